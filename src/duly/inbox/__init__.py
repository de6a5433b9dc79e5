"""Consumers of events: their writes and the inbox row commit together, so a redelivery has no effect."""
