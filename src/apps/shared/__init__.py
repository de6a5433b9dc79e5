"""Values that every context uses, without any input or output."""
