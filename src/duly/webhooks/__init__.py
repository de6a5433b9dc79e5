"""Webhooks, out and in: subscriptions, deliveries that are tried again, and receivers that check signatures."""
