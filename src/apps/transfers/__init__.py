"""Transfers: products change hands when the other side accepts within 72 hours (T1 to T7)."""
