"""Events as an AsyncAPI document: the committed one is current, and an incompatible change is named."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from duly.brokers.asyncapi import describe, find_breaks, render
from duly.errors import Invalid
from duly.messages import EventBody

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


# -- what breaks -----------------------------------------------------------------------------------------------------


class Line(BaseModel):
    sku: str
    amount: Decimal = Decimal("0")


class Placed(EventBody, type="test.order.placed", topic="test.shop", aggregate="order_id"):
    """An order was placed."""

    order_id: str
    kind: Literal["a", "b"] = "a"
    note: str | None = None
    lines: list[Line] = []  # noqa: RUF012 - pydantic copies it
    first: Line | None = None


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
