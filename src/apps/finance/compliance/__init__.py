"""Compliance: cases, and the officers who work on them."""
