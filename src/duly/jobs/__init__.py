"""Work that is due at a time: claimed with a lease, settled with its token."""
