"""Events as an AsyncAPI document: the committed one is current, and an incompatible change is named."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, create_model

from duly.brokers.asyncapi import describe, find_breaks, render
from duly.errors import Invalid
from duly.messages import EventBody, encode_payload

ROOT = Path(__file__).parents[3]
COMMITTED = ROOT / "docs" / "reference" / "asyncapi.json"


def run(*arguments: str) -> tuple[int, str]:
    """The command, in a process that has declared nothing but the applications' events."""
    command = [sys.executable, "-m", "duly.cli.main", "asyncapi", *arguments]
    env = {**os.environ, "DULY_LOG_LEVEL": "error"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_the_committed_document_is_current() -> None:
    """`duly asyncapi > docs/reference/asyncapi.json` writes it."""
    code, printed = run()
    assert code == 0
    assert printed == COMMITTED.read_text()


def test_the_command_refuses_an_incompatible_change_with_a_sentence(tmp_path: Path) -> None:
    old = json.loads(COMMITTED.read_text())
    name, schema = next((k, v) for k, v in old["components"]["schemas"].items() if "." in k and v.get("properties"))
    schema["properties"]["gone"] = {"type": "string"}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    code, said = run("--check", str(path))
    assert code == 1
    assert "the field gone is removed" in said, name
    assert run("--check", str(COMMITTED)) == (
        0,
        "compatible: whoever listens by that document understands the events of today\n",
    )


def git(*arguments: str) -> str | None:
    """What git says here; None where there is none, or it does not know."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def find_origin() -> str | None:
    """What the work of today began with: the last release, else where its branch left the main one, else the commit
    before this one."""
    if released := git("describe", "--tags", "--abbrev=0", "HEAD^"):
        return released
    here = git("rev-parse", "HEAD")
    left = (git("merge-base", "HEAD", main) for main in ("origin/HEAD", "origin/main", "main"))
    return next((one for one in left if one and one != here), git("rev-parse", "HEAD^"))


def test_whoever_listens_by_the_document_that_this_work_began_with_understands_the_events_of_today() -> None:
    """A break that is meant is told in CHANGELOG.md, in the words of `duly asyncapi --check`."""
    origin = find_origin()
    if origin is None:
        pytest.skip("there is no git, or no history: nothing to compare with")
    before = git("show", f"{origin}:docs/reference/asyncapi.json")
    if before is None:
        pytest.skip(f"{origin} has no document of events: nothing to compare with")
    told = (ROOT / "CHANGELOG.md").read_text()
    breaks = find_breaks(json.loads(before), json.loads(COMMITTED.read_text()))
    assert [sentence for sentence in breaks if sentence not in told] == []


# -- what breaks -----------------------------------------------------------------------------------------------------


class Line(BaseModel):
    sku: str
    amount: Decimal = Decimal("0")


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: str


class Placed(EventBody, type="test.order.placed", topic="test.shop", aggregate="order_id"):
    """An order was placed."""

    order_id: str
    kind: Literal["a", "b"] = "a"
    note: str | None = None
    lines: list[Line] = []  # noqa: RUF012 - pydantic copies it
    first: Line | None = None
    few: Annotated[list[str], Field(max_length=3)] = []  # noqa: RUF012 - pydantic copies it
    by_name: dict[str, Line] = {}  # noqa: RUF012 - pydantic copies it
    closed: Closed = Closed(a="")


DOCUMENT = describe({"test.order.placed": Placed})


def changed(*path: str, to: Any = None) -> dict[str, Any]:
    """The document with one place of it removed, or changed."""
    found = copy.deepcopy(DOCUMENT)
    inner: Any = found
    for part in path[:-1]:
        inner = inner[part]
    if to is None:
        inner.pop(path[-1])
    else:
        inner[path[-1]] = to
    return found


CLOSED = ("components", "schemas", "test.order.placed.Closed")
SCHEMA = ("components", "schemas", "test.order.placed")
LINE = ("components", "schemas", "test.order.placed.Line")
MESSAGE = ("components", "messages", "test.order.placed")


def test_every_reference_leads_somewhere_and_every_message_says_what_it_is() -> None:
    text = render(DOCUMENT)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        found: Any = DOCUMENT
        for part in reference.split("/"):
            found = found[part]
    message = DOCUMENT["components"]["messages"]["test.order.placed"]
    assert (message["name"], message["summary"]) == ("test.order.placed", "An order was placed.")
    assert DOCUMENT["channels"]["test.shop"]["address"] == "test.shop"


def test_the_same_events_and_a_new_optional_field_break_nothing() -> None:
    assert find_breaks(DOCUMENT, DOCUMENT) == []
    assert find_breaks(DOCUMENT, changed(*SCHEMA, "properties", "more", to={"type": "string"})) == []
    assert find_breaks(DOCUMENT, changed(*LINE, "properties", "more", to={"type": "string"})) == []
    assert find_breaks(DOCUMENT, changed(*SCHEMA, "properties", "note", "title", to="Another word")) == []
    assert find_breaks(describe({}), DOCUMENT) == []


BREAKS: dict[str, tuple[dict[str, Any], str]] = {
    "removed": (changed(*SCHEMA, "properties", "note"), "the field note is removed"),
    "retyped": (
        changed(*SCHEMA, "properties", "order_id", "type", to="integer"), "order_id changed from string to integer"
    ),
    "required": (
        changed(*SCHEMA, "required", to=["order_id", "note"]),
        "the field note is required now: events that were emitted lack it",
    ),
    "never null": (
        changed(*SCHEMA, "properties", "note", to={"type": "string"}), "note changed from string or null to string"
    ),
    "another choice": (
        changed(*SCHEMA, "properties", "kind", "enum", to=["a", "c"]), "kind changed from one of a, b to one of a, c"
    ),
    "inside a list": (changed(*LINE, "properties", "sku"), "the field lines[].sku is removed"),
    "inside an optional one": (changed(*LINE, "properties", "sku"), "the field first.sku is removed"),
    "moved": (
        changed("channels", "test.shop", "address", to="test.other"), "moved from the topic test.shop to test.other"
    ),
    "another order": (changed(*MESSAGE, "x-aggregate", to="note"), "is ordered by note, and was by order_id"),
    "more of a list": (
        changed(*SCHEMA, "properties", "few", "maxItems", to=4),
        "few changed from array with maxItems 3 to array with maxItems 4",
    ),
    "less of a list": (
        changed(*SCHEMA, "properties", "lines", "minItems", to=1), "lines changed from array to array with minItems 1"
    ),
    "inside a dictionary": (changed(*LINE, "properties", "sku"), "the field by_name.*.sku is removed"),
    "a dictionary of anything": (
        changed(*SCHEMA, "properties", "by_name", "additionalProperties"),
        "by_name takes any other field now, and took other fields of object",
    ),
    "opened": (
        changed(*CLOSED, "additionalProperties"), "closed takes any other field now, and took no other fields"
    ),
    "a field where none was taken": (
        changed(*CLOSED, "properties", "more", to={"type": "string"}), "closed has more now, and took no other fields"
    ),
    "gone": (describe({}), "test.order.placed is gone: whoever listens for it hears nothing more"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BREAKS)
def test_what_would_break_those_who_listen_is_said(kind: str) -> None:
    new, sentence = BREAKS[kind]
    said = find_breaks(DOCUMENT, new)
    assert any(sentence in one for one in said), said
    assert all(one.startswith("test.order.placed") for one in said)


@pytest.mark.parametrize("other", [{}, {"channels": []}, {"channels": {"a": {}}}, {"channels": {"a": None}}])
def test_another_document_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="no AsyncAPI 3 document"):
        find_breaks(other, DOCUMENT)


# -- what is written is what is described ----------------------------------------------------------------------------


class Timed(EventBody, type="test.timed", topic="test.shop", aggregate="id"):
    """An event with values that pydantic's own JSON would write in another way."""

    model_config = ConfigDict(ser_json_timedelta="iso8601")

    id: str
    took: timedelta
    pause: timedelta | None = timedelta(minutes=1)
    at: datetime
    day: date
    number: Annotated[int, PlainSerializer(str, return_type=str, when_used="json")]
    word: Annotated[int, PlainSerializer(str, return_type=str)]


def test_the_document_describes_what_emit_writes() -> None:
    event = Timed(
        id="1", took=timedelta(seconds=1.5), at=datetime(2026, 1, 1, tzinfo=UTC), day=date(2026, 1, 1), number=7, word=8
    )
    written = json.loads(encode_payload(event.envelope().payload))
    described = describe({"test.timed": Timed})["components"]["schemas"]["test.timed"]["properties"]
    kinds = {"string": str, "number": float, "integer": int}
    for name, value in written.items():
        schema = described[name]
        (type_,) = {one["type"] for one in schema.get("anyOf", [schema])} - {"null"}
        assert isinstance(value, kinds[type_]), name
    assert (written["took"], written["number"], written["word"]) == (1.5, 7, "8")
    assert described["pause"]["default"] == 60.0


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _undeclared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test declares, no other one finds."""
    monkeypatch.setattr("duly.messages._DECLARED", {})


def declare(type_: str, topic: str = "test.shop") -> dict[str, type[EventBody]]:
    """An event of this type, with a model within."""
    fields: dict[str, Any] = {"id": (str, ...), "inner": (Line, ...)}
    declared = {"type": type_, "topic": topic, "aggregate": "id"}
    return {type_: create_model("Made", __base__=EventBody, __cls_kwargs__=declared, **fields)}


@pytest.mark.usefixtures("_undeclared")
@pytest.mark.parametrize(
    "declared",
    [
        [("test.a:b",), ("test.a_b",)],
        [("test.a",), ("test.a.Line",)],
        [("test.a", "test.s:t"), ("test.b", "test.s_t")],
        [("CloudEvent",)],
    ],
    ids=["types", "a model within", "topics", "the envelope"],
)
def test_two_that_would_have_one_name_in_the_document_are_refused(declared: list[tuple[str, ...]]) -> None:
    """Else one of them would be missing in it, and never be compared."""
    events: dict[str, type[EventBody]] = {}
    for names in declared:
        events |= declare(*names)
    with pytest.raises(Invalid, match="rename one"):
        describe(events)
