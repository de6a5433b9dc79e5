"""The HTTP face: one commit for each request, idempotency keys, problems, correlation; and what operators ask.

On any FastAPI application: ``install(api, db)``, then routes of a ``Router`` that ask for a ``RequestTx``.
"""

from duly.http.install import install
from duly.http.receiver import Received, Receiver
from duly.http.transactions import RequestTx, Router
from duly.webhooks.receive import Scheme

__all__ = ["Received", "Receiver", "RequestTx", "Router", "Scheme", "install"]
