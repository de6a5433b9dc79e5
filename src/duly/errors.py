"""Every error duly raises, in one tree.

DulyError
├── Malformed                the request cannot be read at all                                (400)
├── Unauthenticated          no token, or one that is not valid                               (401)
├── Forbidden                a valid token without the right                                  (403)
├── TooLarge                 more bytes than are allowed                                      (413)
├── Invalid                  what was given is wrong; nothing was written                     (422)
│   ├── BadPayload           not JSON, too large, too deep, or not storable
│   ├── BadCron              not a five-field cron expression, or one that never fires
│   └── BadZone              not an IANA time zone
├── Conflict                 the state does not allow it                                      (409)
│   ├── AlreadyScheduled     a job for this (name, entity) is pending, and the rule is "reject"
│   └── KeyReused            an idempotency key came back with another request
├── NotFound                 no such job, event, schedule or dead letter                      (404)
├── LeaseLost                another worker holds the job now; our writes were rolled back    (409)
├── OutcomeUnknown           the connection died during COMMIT; ask before doing it again     (503)
├── Unavailable              the database is away                                             (503)
│   ├── Busy                 lost the race for a lock time and again; try later
│   └── StillRunning         the first request with this idempotency key has not ended yet
└── Refused                  a start-up check failed; the message says what to do
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

RETRY_LATER = MappingProxyType({"Retry-After": "2"})


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a request: which part of it, the JSON path there, and what to do."""

    where: str
    path: str
    detail: str


class DulyError(Exception):
    """The root of everything duly raises on purpose."""

    status = 500
    headers: Mapping[str, str] = MappingProxyType({})
    faults: tuple[Fault, ...] = ()


class Malformed(DulyError):
    """The request cannot be read."""

    status = 400


class Unauthenticated(DulyError):
    """There is no valid token."""

    status = 401


class Forbidden(DulyError):
    """The token does not give this right."""

    status = 403


class TooLarge(DulyError):
    """There are more bytes than are allowed."""

    status = 413


class Invalid(DulyError):
    """What was given is wrong; nothing was written."""

    status = 422


class BadPayload(Invalid):
    """The payload cannot be stored as JSON."""


class BadCron(Invalid):
    """The cron expression cannot be used."""


class BadZone(Invalid):
    """The time zone is not in the IANA database."""


class Conflict(DulyError):
    """The present state does not allow it."""

    status = 409


class AlreadyScheduled(Conflict):
    """A job for this name and entity is pending already."""


class KeyReused(Conflict):
    """This idempotency key was used for another request."""


class NotFound(DulyError):
    """There is nothing by that name or id."""

    status = 404


class LeaseLost(DulyError):
    """Another worker holds the job now; whatever this one wrote is rolled back."""

    status = 409


class OutcomeUnknown(DulyError):
    """The connection died during COMMIT: it may or may not have happened."""

    status = 503
    headers = RETRY_LATER


class Unavailable(DulyError):
    """Something this needs cannot be reached."""

    status = 503
    headers = RETRY_LATER


class Busy(Unavailable):
    """Others held the same rows time and again; a later try may succeed."""


class StillRunning(Unavailable):
    """The first request with this idempotency key has not ended yet."""


class Refused(DulyError):
    """A start-up check found something that would lose data or not work."""

    status = 503
