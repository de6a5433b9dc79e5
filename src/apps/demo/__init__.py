"""A shop in miniature, so that a fresh ``make run`` is alive: orders, a payment timer, consumers, cron, failures."""
