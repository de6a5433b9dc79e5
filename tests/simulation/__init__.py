"""Simulation: every decision of the engine, taken millions of times and compared with a simple model of it."""
