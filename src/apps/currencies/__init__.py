"""Currencies: the exchange rates of the National Bank of Poland, day by day (C1)."""
