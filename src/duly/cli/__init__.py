"""The command line: one command for each part, and ``duly up`` for all of them."""
