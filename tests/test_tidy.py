"""What STYLE asks for and a tool can check."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 500
SQL_VERB = re.compile(r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM|CREATE TABLE|ALTER TABLE|DROP TABLE)\b[^.]*\b")
WALL_CLOCK = {
    ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today"),
    ("time", "time"), ("time", "time_ns"),
}  # fmt: skip
BANNED_NAMES = re.compile(r"(^|_)(utils?|helpers?|managers?|data|info|misc|common)$")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parsed(path: Path) -> ast.Module:
    gc.disable()  # Python 3.11 miscounts its depth when a collection comes in between (cpython 106905)
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(parsed(path))


def called(node: ast.AST) -> tuple[str, str] | None:
    """(owner, method) of a call such as ``time.time()``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = node.func.value
        return (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", ""), node.func.attr)
    return None


def offences(rule: str, found: list[str]) -> None:
    assert not found, f"{rule}:\n  " + "\n  ".join(found)


def test_only_the_boundary_commits() -> None:
    allowed = {"src/duly/db.py", "src/duly/brokers/kafka/reading.py"}  # the latter commits offsets to Kafka
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        if relative(path) not in allowed
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and (hit := called(node))
        and (hit[1] in {"commit", "rollback"} or (hit[1] == "transaction" and "connection" in hit[0]))
    ]
    offences("COMMIT belongs to duly/db.py (Database.transaction, atomic)", found)


def test_only_clock_reads_the_wall_clock() -> None:
    found = [
        f"{relative(path)}:{node.lineno} {'.'.join(hit)}"
        for path in SOURCES
        if relative(path) != "src/duly/clock.py"
        for node in nodes(path)
        if isinstance(node, ast.Call) and (hit := called(node)) in WALL_CLOCK and hit
    ]
    offences("the database owns the clock", found)


def test_sql_is_never_formatted() -> None:
    found = []
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr):
                literal = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
                if SQL_VERB.search(literal) and re.search(r"\b(FROM|INTO|SET|WHERE|VALUES|TABLE)\b", literal):
                    found.append(f"{relative(path)}:{node.lineno}")
    offences("SQL is a constant with bound values, never an f-string", found)


def test_functions_and_files_stay_small() -> None:
    found = []
    for path in SOURCES:
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{relative(path)} has {lines} lines")
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{relative(path)}:{node.lineno} {node.name} has {length} lines")
    offences(f"functions under {MAX_FUNCTION_LINES} lines, files under {MAX_FILE_LINES}", found)


def test_modules_and_public_functions_say_what_they_are_for() -> None:
    found = []
    for path in SOURCES:
        tree = parsed(path)
        if not ast.get_docstring(tree):
            found.append(f"{relative(path)}: the module has no opening sentence")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                members = node.body
                if not node.name.startswith("_") and not ast.get_docstring(node):
                    found.append(f"{relative(path)}:{node.lineno} class {node.name}")
            elif isinstance(node, ast.Module):
                members = node.body
            else:
                continue
            found += [
                f"{relative(path)}:{member.lineno} {member.name}"
                for member in members
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
                and not member.name.startswith("_")
                and not ast.get_docstring(member)
            ]
    offences("a docstring is missing", found)


def test_names_say_something() -> None:
    found = [relative(path) for path in SOURCES if BANNED_NAMES.search(path.stem)]
    offences("no utils, helpers, managers, data or info", found)


@pytest.mark.parametrize("marker", ["type: ignore", "noqa"])
def test_an_exemption_has_a_reason(marker: str) -> None:
    found = []
    for path in SOURCES + TESTS:
        if path == Path(__file__):
            continue
        for token in tokenize.generate_tokens(StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT and marker in token.string:
                reason = re.search(rf"{marker}(\[[\w, -]+\]|: ?[A-Z0-9, ]+)? *(-|#) *\w+", token.string)
                if not reason:
                    found.append(f"{relative(path)}:{token.start[0]} {token.string}")
    offences(f"'{marker}' needs '- reason' after it", found)


def test_the_lock_file_holds_names_versions_and_hashes_only() -> None:
    assert "://" not in (ROOT / "requirements.lock").read_text()


def test_no_path_of_a_machine_is_in_a_tracked_file() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    pattern = re.compile(rb"/(root|home/\w+|work)/[\w.]+/")
    found = [name for name in tracked if (ROOT / name).is_file() and pattern.search((ROOT / name).read_bytes())]
    offences("a path of some machine", found)
