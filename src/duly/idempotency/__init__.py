"""Idempotency keys: the same request twice has one effect and the same answer."""
