"""Facts, written in the caller's transaction and relayed in order."""
