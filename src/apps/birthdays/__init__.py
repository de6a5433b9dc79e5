"""Birthdays: one message a year for each user, at nine in the morning by the user's clocks (B2 to B7)."""
