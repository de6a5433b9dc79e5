"""Webhooks, out and in: subscriptions, deliveries that are tried again, and receivers that check signatures.

What an operator, the console and the API call; each gets a transaction, and every change is audited in it.
"""

from __future__ import annotations

from duly.webhooks import actions as _actions  # noqa: F401 - importing it registers them
from duly.webhooks import why as _why  # noqa: F401 - importing it lets ``duly why`` answer for these
from duly.webhooks.deliveries import (
    Attempt,
    Delivery,
    DeliveryWithAttempts,
    count_deliveries,
    count_range,
    find_delivery,
    list_attempts,
    list_deliveries,
    redeliver,
    redeliver_range,
    send_test,
)
from duly.webhooks.receive import add_provider_secret
from duly.webhooks.sealing import Keyring
from duly.webhooks.subscriptions import (
    Created,
    Subscription,
    create_subscription,
    delete_subscription,
    disable_subscription,
    edit_subscription,
    find_subscription,
    list_subscriptions,
    pause_subscription,
    reseal_secrets,
    resume_subscription,
    rotate_secret,
)

__all__ = [
    "Attempt",
    "Created",
    "Delivery",
    "DeliveryWithAttempts",
    "Keyring",
    "Subscription",
    "add_provider_secret",
    "count_deliveries",
    "count_range",
    "create_subscription",
    "delete_subscription",
    "disable_subscription",
    "edit_subscription",
    "find_delivery",
    "find_subscription",
    "list_attempts",
    "list_deliveries",
    "list_subscriptions",
    "pause_subscription",
    "redeliver",
    "redeliver_range",
    "reseal_secrets",
    "resume_subscription",
    "rotate_secret",
    "send_test",
]
