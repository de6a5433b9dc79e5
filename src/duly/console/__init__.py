"""The operators' console: server-rendered, readable without JavaScript, closed to strangers.

An application adds pages of its own with ``app.include_console(Section("orders", "Orders", pages))``; ``pages`` is a
``Pages()`` router whose functions return ``show(request, "orders.html", ...)``.
"""

from duly.app import Section
from duly.console.forms import Wrong, read_wrong
from duly.console.record import read_audit
from duly.console.routes import BadQuery, Pages, Query, check_may_act, may_act, read, read_moment, show, signed_in

__all__ = [
    "BadQuery",
    "Pages",
    "Query",
    "Section",
    "Wrong",
    "check_may_act",
    "may_act",
    "read",
    "read_audit",
    "read_moment",
    "read_wrong",
    "show",
    "signed_in",
]
