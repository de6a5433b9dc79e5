"""Where claims begin while the way there is long (E3.3): what is due is found soon, whatever the machine does."""

from __future__ import annotations

from duly.jobs.walk import CHEAP_CLAIM_SECONDS, COMMIT_SECONDS, MAX_WALK_PAUSE_SECONDS, WALK_PAUSES, Walk

SLOW = CHEAP_CLAIM_SECONDS * 10


def test_one_slow_claim_is_a_hiccup() -> None:
    walk = Walk(["work"])
    walk.note_whole(30.0, at=100.0)
    assert walk.is_whole(100.0)
    walk.note_whole(0.001, at=101.0)
    walk.note_whole(30.0, at=102.0)
    assert walk.is_whole(102.0)


def test_two_slow_claims_are_a_long_way_measured_by_the_quicker() -> None:
    walk = Walk(["work"])
    walk.note_whole(30.0, at=100.0)
    walk.note_whole(SLOW, at=101.0)
    assert not walk.is_whole(101.0 + SLOW * WALK_PAUSES - 0.01)
    assert walk.is_whole(101.0 + SLOW * WALK_PAUSES)
    walk.note_whole(60.0, at=200.0)
    walk.note_whole(60.0, at=200.0)
    assert not walk.is_whole(200.0 + MAX_WALK_PAUSE_SECONDS - 0.01)
    assert walk.is_whole(200.0 + MAX_WALK_PAUSE_SECONDS)


def test_a_busy_machine_is_not_a_long_way() -> None:
    """Claims from where the last one got to are hardly quicker: leases that ended are looked for in each claim."""
    walk = Walk(["work"])
    walk.note_whole(SLOW, at=100.0)
    walk.note_whole(SLOW, at=101.0)
    assert not walk.is_whole(101.0)
    walk.note_onward(SLOW * 0.8)
    assert walk.is_whole(101.0)
    walk.note_whole(SLOW, at=102.0)
    assert walk.is_whole(102.0)


def test_a_long_way_is_left_out_while_that_is_worth_it() -> None:
    walk = Walk(["work"])
    walk.note_whole(SLOW, at=100.0)
    walk.note_whole(SLOW, at=101.0)
    walk.note_onward(SLOW / 10)
    assert not walk.is_whole(102.0)


def test_a_cheap_claim_forgets_where_the_others_got_to() -> None:
    walk = Walk(["work"])
    walk.note_nothing_due(50.0)
    walk.note_whole(0.001, at=100.0)
    assert walk.lacks_starts


def test_what_is_due_after_a_claim_began_is_found_by_the_next() -> None:
    walk = Walk(["work"])
    walk.note_nothing_due(50.0)
    assert set(walk.onward()["starts"]) == {50.0 - COMMIT_SECONDS}
    walk.note_found([("work", 3, 60.0)])
    assert dict(zip(walk.onward()["priorities"], walk.onward()["starts"], strict=True))[3] == 60.0 - COMMIT_SECONDS
