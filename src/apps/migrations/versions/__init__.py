"""One file a step: up and down."""
