"""The ledger: double entry, incremental balances, holds, and a journal that is sealed (F1 to F4)."""
