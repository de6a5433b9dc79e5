"""Stand-ins for the outside world, served in development only; they know no context, and no context knows them."""
