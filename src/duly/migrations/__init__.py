"""The engine's schema, step by step."""
