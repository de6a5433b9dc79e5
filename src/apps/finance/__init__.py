"""The financial core: ledger, decisions, payments, compliance."""
