"""Every number quoted in the docs comes from here. ``make bench`` runs all of it."""
