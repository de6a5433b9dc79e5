"""E4.2: a request's identity is SHA-256 over method, path and normalised body."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duly.errors import Malformed
from duly.idempotency.guard import check_key, fingerprint

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["number", "object", "1.0"])
names = st.text(max_size=4) | st.sampled_from(["number", "object"])
contents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)


def of(body: bytes | str, *, is_json: bool = True, method: str = "POST", path: str = "/a?") -> bytes:
    return fingerprint(method, path, body.encode() if isinstance(body, str) else body, is_json=is_json)


def shuffled(content: Any, dice: random.Random) -> Any:
    """The same content with its members in another order."""
    if isinstance(content, dict):
        members = [(name, shuffled(inner, dice)) for name, inner in content.items()]
        dice.shuffle(members)
        return dict(members)
    return [shuffled(inner, dice) for inner in content] if isinstance(content, list) else content


@given(contents, st.randoms(use_true_random=False), st.booleans(), st.sampled_from([None, 1, "\t"]))
@settings(max_examples=200, deadline=None)
def test_one_content_has_one_fingerprint_however_it_is_written(
    content: Any, dice: random.Random, ascii_only: bool, indent: int | str | None
) -> None:
    """Spaces, order of members and escapes do not count."""
    written = json.dumps(shuffled(content, dice), ensure_ascii=ascii_only, indent=indent)
    assert of(written) == of(json.dumps(content, separators=(",", ":")))


def distinct(content: Any) -> Any:
    """The content in a form in which Python, too, tells true from 1 and a list from a tuple."""
    if isinstance(content, dict):
        return ("object", frozenset((name, distinct(inner)) for name, inner in content.items()))
    if isinstance(content, list):
        return ("list", tuple(distinct(inner) for inner in content))
    return (type(content).__name__, content)


@given(contents, contents)
@settings(max_examples=300, deadline=None)
def test_two_contents_have_two_fingerprints(one: Any, other: Any) -> None:
    """Nothing that a body can say passes for something else."""
    assert (of(json.dumps(one)) == of(json.dumps(other))) == (distinct(one) == distinct(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1.0", "1.00"),
        ("1.0", "1"),
        ("1e2", "100"),
        ("1.0", '{"number":"1.0"}'),
        ("1.0", '{"object":[["number","1.0"]]}'),
        ("0.1", "0.1000000000000000055511151231257827021181583404541015625"),
        ("12345678901234567890.1", "12345678901234567890.2"),
        ("1e1000000000000000000000", "1e1000000000000000000001"),
        ("NaN", '"NaN"'),
        ('{"a":1,"a":2}', '{"a":2}'),
        ("{}", "[]"),
        ("[[1],[2]]", "[[1,2]]"),
        ('"a"', '"A"'),
        ('"\\ud800"', '"\\ud801"'),
        ("", "{}"),
    ],
)
def test_what_looks_alike_is_not_the_same(one: str, other: str) -> None:
    """Also where a float would have rounded the difference away."""
    assert of(one) != of(other)
    assert of(one) == of(one)


@pytest.mark.parametrize("body", [b"\xff", b"{", b"[" * 200_000, b"9" * 5_000, b"1e", b"\x00"])
def test_what_is_no_json_counts_by_its_bytes(body: bytes) -> None:
    """Whatever the header says of it; and the reader neither falls nor refuses."""
    assert of(body) == of(body, is_json=False)
    assert of(body) != of(body + b" ")


def test_json_by_content_never_equals_bytes_by_bytes() -> None:
    assert of('{"object":[["a",1]]}', is_json=False) != of('{"a":1}')


def test_the_parts_do_not_run_into_each_other() -> None:
    assert of("bc", is_json=False, path="/a") != of("c", is_json=False, path="/ab")
    assert of("", method="PUT") != of("", method="POST")
    assert of("", method="post") == of("", method="POST")


def test_a_key_is_visible_ascii_of_bounded_length() -> None:
    assert check_key("x" * 255) == "x" * 255
    for wrong in ("", "x" * 256, "a b", "a\n", "\x7f", "é", "\x00"):
        with pytest.raises(Malformed, match="1 to 255 visible ASCII"):
            check_key(wrong)
