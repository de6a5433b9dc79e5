"""Named steps at which a test can stop, kill or fail this process.

``DULY_FAILPOINTS="worker.claimed=kill9;relay.sent=raise@2"`` arms them: ``name=action[:argument][@hit]``. Actions are
``kill9``, ``stop`` (SIGSTOP), ``term`` (SIGTERM to ourselves), ``raise``, and ``sleep:SECONDS``. ``@2`` means from the
second hit on only; without it the first hit acts. Each armed point acts once. Unarmed, a point costs one dict look-up.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

POINTS = frozenset(
    {
        "worker.before_claim",
        "worker.claimed",
        "worker.before_handler",
        "worker.handler_done",
        "worker.before_settle",
        "worker.settled",
        "worker.before_commit",
        "worker.committed",
        "worker.released",
        "heartbeat.before",
        "heartbeat.after",
        "inbox.marked",
        "relay.fetched",
        "relay.sent",
        "relay.before_commit",
        "relay.committed",
        "idempotency.reserved",
        "http.before_commit",
        "http.before_response",
        "tick.chosen",
        "tick.inserted",
        "tick.committed",
    }
)


class FailpointHit(RuntimeError):
    """Raised by an armed failpoint whose action is ``raise``."""


@dataclass
class _Armed:
    action: str
    argument: str
    hit: int
    seen: int = 0


def _parse(spec: str) -> dict[str, _Armed]:
    armed: dict[str, _Armed] = {}
    for part in filter(None, (piece.strip() for piece in spec.split(";"))):
        name, _, action = part.partition("=")
        action, _, hit = action.partition("@")
        action, _, argument = action.partition(":")
        if name not in POINTS:
            raise ValueError(f"no failpoint is called {name!r}; there are: {', '.join(sorted(POINTS))}")
        armed[name] = _Armed(action, argument, int(hit or 1))
    return armed


_armed: dict[str, _Armed] = _parse(os.environ.get("DULY_FAILPOINTS", ""))


def arm(spec: str) -> None:
    """Replace what is armed in this process; an empty spec disarms everything."""
    global _armed
    _armed = _parse(spec)


def failpoint(name: str) -> None:
    """A no-op, unless a test armed this step."""
    if not _armed:
        return
    point = _armed.get(name)
    if point is None:
        return
    point.seen += 1
    if point.seen == point.hit:
        _act(name, point)


def _act(name: str, point: _Armed) -> None:
    if point.action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif point.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif point.action == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif point.action == "sleep":
        time.sleep(float(point.argument))
    elif point.action == "raise":
        raise FailpointHit(name)
    else:
        raise ValueError(f"failpoint {name}: no action is called {point.action!r}")
