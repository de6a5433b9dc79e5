"""What a session of an identity check is, what may be heard of it, and which words may be kept.

Nothing that describes a person gets in: who is checked is an opaque id, what the provider found is one word of a fixed
list, and the evidence is an opaque reference to where the provider keeps it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from uuid import UUID

from duly.errors import Conflict, Invalid, NotFound

WINDOW = timedelta(hours=24)
"""How long a person has, from the moment the session is made."""
KEPT_DAYS = 1_827
"""Sessions that are over, five years: what the law asks for."""
CALLBACKS_KEPT_DAYS = 400
TOKEN_BYTES = 24

_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
USER_ID = (
    f"^({_UUID}|(user|usr|u|customer|cust|cus|client|member|account|acct|sub|id)[-_]?([0-9]{{1,9}}|[0-9a-f]{{24,64}}))$"
)
"""A UUID, or a number or a hash behind a word for what it is; no address, name or number of a document looks so."""
OPAQUE = f"^({_UUID}|(ev|evd|evidence|chk|check|ver|ref|rep|report|ses|session|kyc)[-_][0-9a-f]{{24,64}})$"
"""What a provider may call a session, or evidence: it says nothing to whoever cannot look it up there."""
_OPAQUE = re.compile(OPAQUE)


class Status(StrEnum):
    """Where a session stands; all but the first two are final."""

    PENDING = "PENDING"  # nobody has opened the provider's page
    IN_PROGRESS = "IN_PROGRESS"
    APPROVED = "APPROVED"
    REJECTED = "REJECTED"
    EXPIRED = "EXPIRED"


OPEN = frozenset({Status.PENDING, Status.IN_PROGRESS})
DECIDED = frozenset({Status.APPROVED, Status.REJECTED})
SAID: Mapping[str, Status] = MappingProxyType(
    {
        "STARTED": Status.IN_PROGRESS, "PENDING": Status.IN_PROGRESS, "IN_PROGRESS": Status.IN_PROGRESS,
        "APPROVED": Status.APPROVED, "VERIFIED": Status.APPROVED, "REJECTED": Status.REJECTED,
        "DECLINED": Status.REJECTED, "EXPIRED": Status.EXPIRED, "ABANDONED": Status.EXPIRED,
    }
)  # fmt: skip
"""The words that a provider may use, and what they mean."""


class Verdict(StrEnum):
    """What else may follow than a move."""

    STAY = "stay"
    CONTRADICT = "contradict"


class Problem(StrEnum):
    """Why a callback is kept for a person."""

    UNKNOWN_SESSION = "unknown_session"
    UNKNOWN_STATUS = "unknown_status"
    NAMES_DIFFER = "names_differ"
    BAD_EVIDENCE = "bad_evidence"
    CONTRADICTS = "contradicts"


class Handled(StrEnum):
    """What a person did about a callback that was kept. A word of a list: in free text somebody would name a person."""

    CORRECTED = "CORRECTED"
    NOT_OURS = "NOT_OURS"
    NO_ACTION = "NO_ACTION"


class SessionNotFound(NotFound):
    """There is no such session."""


class UnknownProvider(Invalid):
    """No provider of this name is plugged in."""


class CallbackNotFound(NotFound):
    """No such callback is kept."""


class CallbackDealtWith(Conflict):
    """Somebody has dealt with the callback before."""


@dataclass(frozen=True)
class Session:
    """One check of one person, whom only an opaque id names; ``token`` is a digest of what opens the person's page."""

    id: UUID
    user_id: str
    provider: str
    status: Status
    token: str
    requested_by: str
    version: int
    created_at: datetime
    expires_at: datetime
    updated_at: datetime
    provider_ref: str | None = None
    evidence_ref: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether it may still be approved."""
        return self.status in OPEN


@dataclass(frozen=True)
class HistoryLine:
    """One thing that happened to a session."""

    number: int
    at: datetime
    from_status: Status | None
    to_status: Status
    cause: str


@dataclass(frozen=True)
class Callback:
    """What a provider called to say, after everything was left out that may not be kept."""

    provider: str
    event_id: str  # a digest of the provider's own
    client_ref: UUID | None
    session_ref: str | None
    status: Status | None
    evidence_ref: str | None


def hash_token(token: str) -> str:
    """What is kept of a token: whoever reads the database opens nobody's page with it."""
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()


def opens(session: Session, token: str) -> bool:
    """Whether this is the token of the session; those that the release before made are kept as they are, for a day."""
    said = hash_token(token) if len(session.token) == len(hash_token("")) else token
    return hmac.compare_digest(session.token.encode(), said.encode("utf-8", "replace"))


def is_opaque(text: object) -> bool:
    """Whether a reference may be kept."""
    return isinstance(text, str) and _OPAQUE.fullmatch(text) is not None


def hear(session: Session, status: Status, *, evidence_ref: str | None) -> Session | Verdict:
    """The session after this was heard of it; or that nothing follows, or that it contradicts how it ended."""
    if not session.is_open:
        is_old_news = status is session.status or status in OPEN
        return Verdict.STAY if is_old_news else Verdict.CONTRADICT
    if status is Status.IN_PROGRESS and session.status is Status.IN_PROGRESS:
        return Verdict.STAY
    return replace(session, status=status, evidence_ref=evidence_ref if status in DECIDED else None)


def has_run_out(session: Session, now: datetime) -> bool:
    """Whether its time is over, though nobody may have said so yet."""
    return session.is_open and now >= session.expires_at
