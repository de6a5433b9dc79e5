"""The rules alone, without a database: who may do what, and when (T1, T2)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from apps.transfers import store
from apps.transfers.model import (
    ACCEPTANCE_WINDOW,
    REQUEST_MOVES,
    NotOwner,
    NotRecipient,
    NotStarter,
    NotYours,
    Product,
    RequestStatus,
    SelfTransfer,
    Transfer,
    TransferClosed,
    TransferExpired,
    TransferPending,
    TransferStatus,
    status_of_new_request,
)
from duly.errors import DulyError

STARTED = datetime(2033, 3, 26, 9, 30, tzinfo=UTC)  # the clocks change in between, and it does not matter
LAST_MOMENT = STARTED + timedelta(hours=72)
TICK = timedelta(microseconds=1)


def transfer(status: TransferStatus = TransferStatus.PENDING) -> Transfer:
    return Transfer(uuid4(), uuid4(), "alice", "bob", status, STARTED, STARTED)


def test_the_window_is_72_hours_and_its_last_moment_belongs_to_it() -> None:
    """T1."""
    assert timedelta(hours=72) == ACCEPTANCE_WINDOW
    assert transfer().expires_at == LAST_MOMENT
    assert not transfer().is_overdue(LAST_MOMENT)
    assert transfer().is_overdue(LAST_MOMENT + TICK)


def test_the_statements_speak_of_the_same_72_hours() -> None:
    """T3: strictly older, in the sweep as in the model."""
    for statement in (store.LOCK_PRODUCTS_OF_DUE_TRANSFERS, store.EXPIRE_DUE_TRANSFERS):
        assert "created_at < duly.now() - interval '72 hours'" in statement.text


@pytest.mark.parametrize(
    ("step", "by", "becomes"),
    [
        ("accept", "bob", TransferStatus.ACCEPTED),
        ("reject", "bob", TransferStatus.REJECTED),
        ("cancel", "alice", TransferStatus.CANCELLED),
    ],
)
def test_each_step_is_for_one_of_the_two_until_the_last_moment(step: str, by: str, becomes: TransferStatus) -> None:
    """T1."""
    ended = getattr(transfer(), step)(by, LAST_MOMENT)
    assert (ended.status, ended.updated_at, ended.created_at) == (becomes, LAST_MOMENT, STARTED)
    with pytest.raises(TransferExpired):
        getattr(transfer(), step)(by, LAST_MOMENT + TICK)


@pytest.mark.parametrize(
    ("step", "by", "refusal"),
    [
        ("accept", "alice", NotRecipient),
        ("accept", "mallory", NotRecipient),
        ("reject", "alice", NotRecipient),
        ("cancel", "bob", NotStarter),
        ("cancel", "mallory", NotStarter),
    ],
)
@pytest.mark.parametrize("status", list(TransferStatus))
def test_whose_it_is_not_is_told_so_whatever_its_state(
    step: str, by: str, refusal: type[DulyError], status: TransferStatus
) -> None:
    """T1: 403 before 409, so that a stranger learns nothing."""
    with pytest.raises(refusal):
        getattr(transfer(status), step)(by, LAST_MOMENT + TICK)


@pytest.mark.parametrize("status", [status for status in TransferStatus if status is not TransferStatus.PENDING])
@pytest.mark.parametrize(("step", "by"), [("accept", "bob"), ("reject", "bob"), ("cancel", "alice")])
def test_what_has_ended_stays_as_it_is(step: str, by: str, status: TransferStatus) -> None:
    """T1: expired or ended ones cannot be accepted."""
    refusal = TransferExpired if status is TransferStatus.EXPIRED else TransferClosed
    with pytest.raises(refusal):
        getattr(transfer(status), step)(by, STARTED)
    with pytest.raises(refusal):
        transfer(status).expire(LAST_MOMENT + TICK)


def test_a_pending_one_expires_after_the_last_moment_and_not_before() -> None:
    """T3."""
    with pytest.raises(TransferPending):
        transfer().expire(LAST_MOMENT)
    expired = transfer().expire(LAST_MOMENT + TICK)
    assert (expired.status, expired.updated_at) == (TransferStatus.EXPIRED, LAST_MOMENT + TICK)


def test_a_product_is_offered_by_its_owner_to_somebody_else() -> None:
    """T1: 403 comes before 422."""
    product = Product(uuid4(), "Lathe", "alice", STARTED)
    product.check_offer(by="alice", to="bob")
    with pytest.raises(SelfTransfer):
        product.check_offer(by="alice", to="alice")
    with pytest.raises(NotOwner):
        product.check_offer(by="bob", to="alice")


def test_a_transfer_is_read_by_the_two_whom_it_concerns() -> None:
    """T1."""
    transfer().check_reader("alice")
    transfer().check_reader("bob")
    with pytest.raises(NotYours):
        transfer().check_reader("mallory")


def test_requests_follow_the_transfer() -> None:
    """T2: paused while pending, resumed when nothing came of it, cancelled with the old owner."""
    moves = {status: (set(move.was), move.becomes) for status, move in REQUEST_MOVES.items()}
    resumed = ({RequestStatus.PAUSED}, RequestStatus.IN_PROGRESS)
    assert moves == {
        TransferStatus.PENDING: ({RequestStatus.IN_PROGRESS}, RequestStatus.PAUSED),
        TransferStatus.ACCEPTED: ({RequestStatus.IN_PROGRESS, RequestStatus.PAUSED}, RequestStatus.CANCELLED),
        TransferStatus.REJECTED: resumed,
        TransferStatus.CANCELLED: resumed,
        TransferStatus.EXPIRED: resumed,
    }
    assert status_of_new_request(None) is RequestStatus.IN_PROGRESS
    assert status_of_new_request(transfer()) is RequestStatus.PAUSED
