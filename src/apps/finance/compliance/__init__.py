"""Compliance: cases that people decide about, and the screening that opens them."""
