"""What is built on duly."""
