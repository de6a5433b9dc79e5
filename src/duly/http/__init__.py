"""The HTTP face: the application's routes, and what an operator and a probe ask of every process."""
