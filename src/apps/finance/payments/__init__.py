"""Payments: money that goes through a bank, screened, held, sent once, and given back when it did not arrive."""
