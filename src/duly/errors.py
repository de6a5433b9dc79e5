"""Every error duly raises, in one tree.

DulyError
├── Invalid                  what was given is wrong; nothing was written                     (422)
│   ├── BadPayload           not JSON, too large, too deep, or not storable
│   ├── BadCron              not a five-field cron expression, or one that never fires
│   └── BadZone              not an IANA time zone
├── Conflict                 the state does not allow it                                      (409)
│   └── AlreadyScheduled     a job for this (name, entity) is pending, and the rule is "reject"
├── NotFound                 no such job, event, schedule or dead letter                      (404)
├── LeaseLost                another worker holds the job now; our writes were rolled back    (409)
├── OutcomeUnknown           the connection died during COMMIT; ask before doing it again     (503)
├── Unavailable              the database is away                                             (503)
└── Refused                  a start-up check failed; the message says what to do
"""

from __future__ import annotations


class DulyError(Exception):
    """The root of everything duly raises on purpose."""

    status = 500


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


class NotFound(DulyError):
    """There is nothing by that name or id."""

    status = 404


class LeaseLost(DulyError):
    """Another worker holds the job now; whatever this one wrote is rolled back."""

    status = 409


class OutcomeUnknown(DulyError):
    """The connection died during COMMIT: it may or may not have happened."""

    status = 503


class Unavailable(DulyError):
    """The database cannot be reached."""

    status = 503


class Refused(DulyError):
    """A start-up check found something that would lose data or not work."""

    status = 503
