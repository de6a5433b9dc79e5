"""What turns the engine's parts into running processes."""
