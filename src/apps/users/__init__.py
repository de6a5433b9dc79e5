"""Users: people with a date of birth and a time zone (B1, B5); who they are, and nothing of what is made of it."""
