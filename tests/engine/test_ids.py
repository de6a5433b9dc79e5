"""Identifiers: version 7, in the order of time, unique."""

from __future__ import annotations

from uuid import UUID

import pytest

from duly.clock import unix_milliseconds
from duly.ids import uuid7, uuid7s


@pytest.mark.parametrize("many", [False, True])
def test_an_id_is_a_uuid_of_version_7_of_this_moment(many: bool) -> None:
    made = uuid7s(500) if many else [uuid7() for _ in range(500)]
    now = unix_milliseconds()
    assert len(set(made)) == 500
    for one in made:
        assert isinstance(one, UUID)
        assert (one.version, one.variant) == (7, "specified in RFC 4122")
        assert 0 <= now - (one.int >> 80) < 60_000
        assert UUID(str(one)) == one


def test_none_are_none() -> None:
    assert uuid7s(0) == []
