"""Identity checks by somebody else: sessions, how they end, and a reference to the evidence; nothing of a person."""
