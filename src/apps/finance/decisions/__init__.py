"""Decisions: rules that people write, compiled, explained, logged and replayed (F11, F12)."""
