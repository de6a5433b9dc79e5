"""Real brokers: one suite over all of them, and what only one of them does."""
