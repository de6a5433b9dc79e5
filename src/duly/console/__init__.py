"""The operators' console: server-rendered, readable without JavaScript, closed to strangers.

An application adds pages of its own with ``app.include_console(Section("orders", "Orders", pages))``; ``pages`` is a
``Pages()`` router whose functions return ``show(request, "orders.html", ...)``.
"""

from duly.app import Section
from duly.console.routes import BadQuery, Pages, Query, read, show

__all__ = ["BadQuery", "Pages", "Query", "Section", "read", "show"]
