"""duly."""
