"""The facts of identity checks; the only door for other contexts. Nothing in them describes a person."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from pydantic import ConfigDict
from pydantic.alias_generators import to_camel

from duly import EventBody

TOPIC = "kyc.events"
CAMEL = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class SessionCreated(EventBody, type="kyc.session.created", topic=TOPIC, aggregate="session_id"):
    """Somebody is to be checked, until then."""

    model_config = CAMEL
    session_id: UUID
    user_id: str
    provider: str
    expires_at: datetime


class SessionApproved(EventBody, type="kyc.session.approved", topic=TOPIC, aggregate="session_id"):
    """The provider is satisfied; it keeps the evidence under this reference."""

    model_config = CAMEL
    session_id: UUID
    user_id: str
    provider: str
    evidence_ref: str


class SessionRejected(EventBody, type="kyc.session.rejected", topic=TOPIC, aggregate="session_id"):
    """The provider is not satisfied; it keeps the evidence under this reference."""

    model_config = CAMEL
    session_id: UUID
    user_id: str
    provider: str
    evidence_ref: str


class SessionExpired(EventBody, type="kyc.session.expired", topic=TOPIC, aggregate="session_id"):
    """Its time was over before anybody knew."""

    model_config = CAMEL
    session_id: UUID
    user_id: str
    provider: str
