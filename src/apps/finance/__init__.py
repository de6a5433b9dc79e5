"""The financial core: the ledger, decisions and payments; calls go down, never up."""
