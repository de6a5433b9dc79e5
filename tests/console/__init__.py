"""The console over real HTTP."""
