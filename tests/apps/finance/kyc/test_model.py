"""The rules of sessions, by themselves."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.finance.kyc.model import OPEN, SAID, Session, Status, Verdict, has_run_out, hear, is_opaque

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
SESSION = Session(
    uuid4(), "user-1", "sandbox", Status.PENDING, "t" * 32, "agent", 1, NOW, NOW + timedelta(hours=24), NOW
)
EVIDENCE = "ev_7e57ca5e7e57ca5e7e57ca5e7e57ca5e"


@given(st.lists(st.sampled_from(sorted(set(SAID.values()))), max_size=12))
def test_whatever_is_heard_a_session_ends_once_and_stays_so(heard: list[Status]) -> None:
    session, ended = SESSION, None
    for status in heard:
        after = hear(session, status, evidence_ref=EVIDENCE)
        if isinstance(after, Session):
            assert ended is None, "it was over"
            assert after.status not in (Status.PENDING, session.status)
            session = after
            ended = session.status if session.status not in OPEN else None
        elif after is Verdict.CONTRADICT:
            assert ended is not None
            assert status is not ended
    first = next((status for status in heard if status not in OPEN), None)
    assert ended is first


@pytest.mark.parametrize("status", [Status.APPROVED, Status.REJECTED, Status.EXPIRED, Status.IN_PROGRESS])
def test_only_what_is_decided_has_evidence(status: Status) -> None:
    after = hear(SESSION, status, evidence_ref=EVIDENCE)
    assert isinstance(after, Session)
    assert (after.evidence_ref is not None) == (status in (Status.APPROVED, Status.REJECTED))


def test_a_session_is_over_at_its_end_and_not_before() -> None:
    assert not has_run_out(SESSION, SESSION.expires_at - timedelta(microseconds=1))
    assert has_run_out(SESSION, SESSION.expires_at)
    assert not has_run_out(replace(SESSION, status=Status.APPROVED), SESSION.expires_at)


@pytest.mark.parametrize(
    "reference",
    ["", "Ann Kowalska", "ABC123456", "1990-01-02", "ann@example.com", "ev_ABC", "ev_" + "a" * 23, "ev_" + "a" * 65,
     "kowalska_" + "a" * 32, EVIDENCE.upper(), EVIDENCE + "\n", " " + EVIDENCE, None, 7, b"ev", ["ev"]],
)  # fmt: skip
def test_what_may_say_something_is_not_opaque(reference: object) -> None:
    assert not is_opaque(reference)


@given(st.uuids(), st.integers(24, 64))
def test_what_only_the_provider_can_look_up_is_opaque(id: object, length: int) -> None:
    assert is_opaque(str(id))
    assert is_opaque("ev_" + ("0123456789abcdef" * 4)[:length])
