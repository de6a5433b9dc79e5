"""Chaos runs: real processes and a real PostgreSQL under faults, and a checker that can fail."""
