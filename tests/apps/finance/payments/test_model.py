"""The table of moves, without a database: what may follow from what, and what never does (F5 to F7)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import product
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.finance.payments.model import (
    CHANGES,
    CLOCKS_DIFFER,
    GAVE_UP,
    INSUFFICIENT_BALANCE,
    LAST_TRY,
    LONGEST_QUESTION_WAIT,
    MOVES,
    NOT_APPROVED,
    REVIEW_EXPIRED,
    REVIEW_REJECTED,
    SCREENING,
    VALIDITY,
    WAITS,
    Callback,
    Delivery,
    Heard,
    NotResolvable,
    Payment,
    Report,
    Resolution,
    Source,
    State,
    Verdict,
    doubt,
    hear,
    is_with_us,
    resolve,
    tell_reason,
    wait_before_asking,
)

NOW = datetime(2026, 6, 15, 12, tzinfo=UTC)
FINAL = (State.REJECTED, State.COMPLETED, State.PERMANENTLY_FAILED)


def payment(
    state: State = State.PROCESSING, *, attempts: int = 1, age: timedelta = timedelta(0), **more: object
) -> Payment:
    reason = (
        "r"
        if state in (State.REJECTED, State.UNKNOWN, State.FAILED, State.RETURNING, State.PERMANENTLY_FAILED)
        else None
    )
    began = NOW - age
    made = Payment(
        UUID(int=1), UUID(int=2), UUID(int=3), Decimal(1), "PLN", state, "t", "bank", UUID(int=4), 1, began, began,
        began, reason=reason, attempts=attempts, sent_at=began if attempts else None,
    )  # fmt: skip
    if state is State.FAILED:
        made = replace(made, retryable=True, next_retry_at=NOW)
    return replace(made, **more)  # type: ignore[arg-type]  # fields by name


def heard(report: Report, source: Source = Source.SEND, **more: object) -> Heard:
    base = {"attempt": 1} if source is Source.SEND else {"version": 1, "asked_at": NOW} if source is Source.ASK else {}
    return Heard(report, source, **(base | more))  # type: ignore[arg-type]  # fields by name


def test_every_state_says_what_follows_from_every_report() -> None:
    assert {(state, report) for state, row in MOVES.items() for report in row} == set(product(State, Report))


@pytest.mark.parametrize(("state", "report", "source"), list(product(State, Report, Source)))
def test_only_changes_that_the_history_allows_follow(state: State, report: Report, source: Source) -> None:
    for attempts, age in product((1, 7), (timedelta(0), timedelta(days=2))):
        was = payment(state, attempts=attempts, age=age)
        after = hear(was, heard(report, source, **({"attempt": attempts} if source is Source.SEND else {})), now=NOW)
        if isinstance(after, Payment) and after.state is not state:
            assert (state, after.state) in CHANGES
            assert state not in FINAL


@pytest.mark.parametrize("state", FINAL)
@pytest.mark.parametrize("report", Report)
def test_what_is_over_stays_over(state: State, report: Report) -> None:
    """F6: late and out-of-order news."""
    assert hear(payment(state), heard(report, Source.CALLBACK), now=NOW) in (Verdict.STAY, Verdict.CONTRADICT)


def test_no_money_goes_back_on_anything_but_the_banks_own_word() -> None:
    """PERMANENTLY_FAILED follows from DECLINED, or from the answer that there is no such payment after the last try."""
    for state, report, source, attempts in product(State, Report, Source, range(8)):
        if attempts == 0 and state in (State.UNKNOWN, State.COMPLETED):
            continue
        told = heard(report, source, **({"attempt": attempts} if source is Source.SEND else {}))
        after = hear(payment(state, attempts=attempts, age=timedelta(days=1)), told, now=NOW)
        if isinstance(after, Payment) and after.state is State.PERMANENTLY_FAILED:
            assert report is Report.DECLINED or (report is Report.NOT_KNOWN and attempts > len(WAITS))
            assert report is Report.DECLINED or after.reason == GAVE_UP


def test_no_such_payment_is_believed_only_when_our_request_cannot_arrive_any_more() -> None:
    told = heard(Report.NOT_KNOWN, Source.ASK)
    longest = VALIDITY + CLOCKS_DIFFER
    young = hear(payment(State.UNKNOWN, age=longest - timedelta(seconds=1)), told, now=NOW)
    old = hear(payment(State.UNKNOWN, age=longest), told, now=NOW)
    assert young is Verdict.STAY
    assert isinstance(old, Payment)
    assert (old.state, old.next_retry_at) == (State.FAILED, NOW)


def test_no_such_payment_is_judged_by_the_moment_of_the_question() -> None:
    """However long its answer was under way: the bank may have looked at once."""
    was = payment(State.UNKNOWN, age=timedelta(minutes=10))
    early = heard(Report.NOT_KNOWN, Source.ASK, asked_at=NOW - timedelta(minutes=9))
    assert hear(was, early, now=NOW) is Verdict.STAY
    assert hear(was, heard(Report.NOT_KNOWN, Source.ASK, asked_at=None), now=NOW) is Verdict.STAY


@pytest.mark.parametrize("delivery", [None, Delivery.DUE])
def test_not_taken_is_believed_only_while_that_request_is_under_way(delivery: Delivery | None) -> None:
    """Meanwhile the bank has called, so it has it: it is asked."""
    after = hear(payment(delivery=delivery), heard(Report.NOT_TAKEN), now=NOW)
    assert isinstance(after, Payment)
    assert after.state is State.UNKNOWN
    assert hear(payment(State.UNKNOWN), heard(Report.NOT_TAKEN), now=NOW) is Verdict.STAY


def test_an_answer_to_an_old_question_or_request_is_not_believed() -> None:
    for report in (Report.NOT_KNOWN, Report.PENDING, Report.UNCLEAR):
        assert (
            hear(payment(State.UNKNOWN, age=timedelta(days=1), version=2), heard(report, Source.ASK), now=NOW)
            is Verdict.STAY
        )
    for report in (Report.NOT_TAKEN, Report.UNCLEAR):
        assert hear(payment(attempts=2), heard(report), now=NOW) is Verdict.STAY
    settled = hear(payment(State.UNKNOWN, version=2), heard(Report.SETTLED, Source.ASK), now=NOW)
    assert isinstance(settled, Payment)
    assert settled.state is State.COMPLETED


@pytest.mark.parametrize(("attempts", "minutes"), [(1, 1), (2, 5), (3, 15), (4, 60), (5, 6 * 60), (6, 24 * 60)])
def test_each_retry_waits_as_f7_says(attempts: int, minutes: int) -> None:
    was = payment(attempts=attempts, delivery=Delivery.UNDER_WAY)
    after = hear(was, heard(Report.NOT_TAKEN, attempt=attempts), now=NOW)
    assert isinstance(after, Payment)
    assert (after.state, after.next_retry_at) == (State.FAILED, NOW + timedelta(minutes=minutes))
    assert len(WAITS) == 6


def test_after_the_last_try_the_bank_is_asked_first() -> None:
    after = hear(payment(attempts=7, delivery=Delivery.UNDER_WAY), heard(Report.NOT_TAKEN, attempt=7), now=NOW)
    assert isinstance(after, Payment)
    assert (after.state, after.reason) == (State.UNKNOWN, LAST_TRY)


def test_a_payment_that_the_bank_has_is_not_due_any_more() -> None:
    after = hear(payment(attempts=0, delivery=Delivery.DUE), heard(Report.PENDING, Source.CALLBACK), now=NOW)
    assert isinstance(after, Payment)
    assert (after.state, after.delivery) == (State.PROCESSING, None)


def test_a_reference_is_kept_once_it_is_known() -> None:
    first = hear(payment(), heard(Report.PENDING, reference="a"), now=NOW)
    assert isinstance(first, Payment)
    assert first.provider_ref == "a"
    again = hear(first, heard(Report.SETTLED, Source.CALLBACK, reference="b"), now=NOW)
    assert isinstance(again, Payment)
    assert again.provider_ref == "a"


@given(st.timedeltas(timedelta(0), timedelta(days=400)), st.sampled_from([State.PROCESSING, State.UNKNOWN]))
def test_questions_have_bounds(age: timedelta, state: State) -> None:
    wait = wait_before_asking(payment(state, age=age), now=NOW)
    assert timedelta(seconds=30) <= wait <= LONGEST_QUESTION_WAIT


@pytest.mark.parametrize(
    ("status", "retryable", "report"),
    [
        ("SETTLED", False, Report.SETTLED), ("completed", False, Report.SETTLED), ("PENDING", False, Report.PENDING),
        ("FAILED", False, Report.DECLINED), ("FAILED", True, Report.UNCLEAR), ("WHATEVER", False, None),
    ],
)  # fmt: skip
def test_what_a_status_means(status: str, retryable: bool, report: Report | None) -> None:
    assert Callback("bank", "e", "r", status, retryable).report is report


@pytest.mark.parametrize(("state", "report", "source"), list(product(State, Report, Source)))
def test_nothing_follows_for_what_was_contradicted_until_a_person_has_decided(
    state: State, report: Report, source: Source
) -> None:
    was = payment(state, contradicted_at=NOW, delivery=Delivery.UNDER_WAY if state is State.PROCESSING else None)
    assert hear(was, heard(report, source), now=NOW) is Verdict.STAY
    assert doubt(was, "amount_differs") is None
    assert not is_with_us(was)


@pytest.mark.parametrize("state", [State.PROCESSING, State.UNKNOWN, State.FAILED])
@pytest.mark.parametrize("report", [Report.PENDING, Report.SETTLED, Report.DECLINED])
@pytest.mark.parametrize(
    "more", [{"amount": Decimal(2)}, {"currency": "EUR"}, {"amount": Decimal(1), "currency": "EUR"}]
)
def test_what_the_bank_says_of_another_amount_or_currency_contradicts(
    state: State, report: Report, more: dict[str, object]
) -> None:
    assert hear(payment(state), heard(report, Source.SEND, **more), now=NOW) is Verdict.CONTRADICT
    same = hear(payment(state), heard(report, amount=Decimal("1.00"), currency="PLN"), now=NOW)
    assert same is not Verdict.CONTRADICT


@pytest.mark.parametrize("state", [State.PROCESSING, State.UNKNOWN, State.FAILED])
def test_what_was_reversed_cannot_settle(state: State) -> None:
    """The recipient has no money that could arrive."""
    assert hear(payment(state), heard(Report.SETTLED), now=NOW, is_reversed=True) is Verdict.CONTRADICT
    declined = hear(payment(state), heard(Report.DECLINED), now=NOW, is_reversed=True)
    assert isinstance(declined, Payment)


def test_a_bank_that_had_no_such_payment_and_has_it_now_contradicts_itself() -> None:
    for reason, expected in ((GAVE_UP, Verdict.CONTRADICT), ("declined", Verdict.STAY)):
        was = payment(State.PERMANENTLY_FAILED, reason=reason)
        assert hear(was, heard(Report.PENDING, Source.CALLBACK), now=NOW) is expected


@pytest.mark.parametrize(("seconds", "expected"), [(0, 90), (10, 80), (44, 46), (46, 46), (7_200, 7_200)])
def test_the_bank_is_not_asked_while_our_request_may_arrive(seconds: int, expected: int) -> None:
    """A minute in which it may take the request, and half a minute by which its clock may be behind."""
    was = payment(State.UNKNOWN, age=timedelta(seconds=seconds))
    assert wait_before_asking(was, now=NOW) == timedelta(seconds=expected)


def test_only_what_certainly_is_with_us_is_called_back() -> None:
    for state, delivery, expected in (
        (State.PROCESSING, Delivery.DUE, True), (State.PROCESSING, Delivery.UNDER_WAY, False),
        (State.PROCESSING, None, False), (State.UNKNOWN, None, False), (State.FAILED, None, True),
        (State.COMPLETED, None, False), (State.RETURNING, None, False),
    ):  # fmt: skip
        assert is_with_us(payment(state, delivery=delivery)) is expected
    assert not is_with_us(payment(State.FAILED, retryable=False, next_retry_at=None))


def test_what_the_bank_may_have_after_a_strange_call_is_asked_about() -> None:
    for state, delivery, expected in (
        (State.PROCESSING, Delivery.DUE, State.UNKNOWN), (State.PROCESSING, Delivery.UNDER_WAY, State.UNKNOWN),
        (State.PROCESSING, None, None), (State.FAILED, None, State.UNKNOWN), (State.COMPLETED, None, None),
    ):  # fmt: skip
        after = doubt(payment(state, delivery=delivery), "unknown_status")
        assert (after.state if after else None) is expected


@pytest.mark.parametrize(
    ("state", "wrong"),
    [
        (State.COMPLETED, Resolution.RETURN), (State.PERMANENTLY_FAILED, Resolution.COMPLETE),
        (State.REJECTED, Resolution.COMPLETE),
    ],
)  # fmt: skip
def test_a_person_cannot_turn_an_end_into_the_other_one(state: State, wrong: Resolution) -> None:
    was = payment(state, contradicted_at=NOW)
    with pytest.raises(NotResolvable):
        resolve(was, wrong)
    right = next(one for one in Resolution if one is not wrong)
    assert resolve(was, right) == replace(was, contradicted_at=None)


def test_why_a_payment_was_not_approved_is_not_told() -> None:
    for reason in (SCREENING, REVIEW_REJECTED, REVIEW_EXPIRED):
        assert tell_reason(reason) == NOT_APPROVED
    for told in (INSUFFICIENT_BALANCE, GAVE_UP, None):
        assert tell_reason(told) == told
