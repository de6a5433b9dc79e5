"""``duly-dossier``: exit codes, hostile files, and what a check needs: a file, and nothing else."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from apps.finance.dossier import command
from apps.finance.dossier.signing import FILE, VARIABLE, Signer
from apps.shared.canonical import encode
from duly.errors import Refused
from duly.settings import Settings
from tests.apps.finance.dossier.test_model import OTHER, SEED, SIGNER, make

KEY = SIGNER.public_keys()["2026"]
ROOT = Path(__file__).parents[4]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "dossier.json"
    path.write_bytes(encode(make()))
    return path


def test_a_dossier_is_valid_with_the_key_that_signed_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["verify", str(file), "--trust", KEY]) == 0
    said = capsys.readouterr().out
    assert said.startswith("VALID")
    assert "complete: nothing is missing" in said
    assert command.run(["verify", str(file), "--trust", f"2026:{KEY}"]) == 0
    other = Signer({"o": OTHER}).public_keys()["o"]
    assert command.run(["verify", str(file), "--trust", other, "--trust", KEY]) == 0


@pytest.mark.parametrize("trust", [[], ["--trust", ""], ["--trust", "  "], ["--trust", "", "--trust", ""]])
def test_without_a_key_nothing_is_accepted(file: Path, trust: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 3: consistent, and anybody may have made it."""
    assert command.run(["verify", str(file), *trust]) == 3
    said = capsys.readouterr().out
    assert said.startswith("SIGNER UNKNOWN")
    assert "\nVALID" not in said


def test_another_key_is_not_the_signer(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Signer({"o": OTHER}).public_keys()["o"]
    assert command.run(["verify", str(file), "--trust", other]) == 1
    assert capsys.readouterr().out.startswith("NOT VALID")


@pytest.mark.parametrize("trust", ["x", "AAAA", "none", "0", base64.b64encode(SEED + b"1").decode()])
def test_a_key_that_is_none_is_a_mistake(file: Path, trust: str) -> None:
    assert command.run(["verify", str(file), "--trust", trust]) == 2


@pytest.mark.parametrize("arguments", [[], ["verify"], ["check", "x"], ["export", "no-id"], ["verify", "a", "b"]])
def test_a_mistake_in_the_arguments_is_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.run(arguments)
    assert ended.value.code == 2


def nested(levels: int) -> bytes:
    return b'{"format": "duly.dossier/2", "sections": ' + b"[" * levels + b"]" * levels + b"}"


def with_record(record: str) -> bytes:
    """A record that Python's json would read, in a dossier that is otherwise right."""
    dossier = json.dumps(make())
    return dossier.replace('"amount": "10.00"', f'"amount": {record}', 1).encode("utf-8", "surrogatepass")


HOSTILE: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 2),
    "nothing": (b"null", 2),
    "cut": (encode(make())[:-50], 2),
    "deep": (nested(200_000), 2),
    "deep objects": (b'{"a":' * 200_000, 2),
    "a little too deep": (nested(80), 2),
    "surrogate": (with_record('"\\ud800"'), 2),
    "surrogate bytes": (with_record('"\ud800"'), 2),
    "huge number": (with_record("9" * 1_000_000), 2),
    "huge exponent": (with_record("1e999999999"), 2),
    "NaN": (with_record("NaN"), 2),
    "a fraction": (with_record("10.0"), 2),
    "twice the same": (with_record('"1", "amount": "10.00"'), 2),
    "another type": (with_record("10"), 1),
    "NUL": (with_record('"\\u0000"'), 1),
    "terminal": (encode({**make(), "paymentId": "\x1b[31mred\x1b[0m"}), 1),
    "many parts": (b"[" + b"[]," * 2_000_000 + b"[]]", 2),
    "quotes": (b'"' * 18_000_000 + b"," * 500_000, 2),
    "escapes": (b'"' + b'\\"' * 9_000_000 + b"," * 500_000, 2),
    "another version": (encode({**make(), "format": "duly.dossier/1"}), 2),
    "many strings": (b'{"format":"duly.dossier/2","a":[' + b'"",' * 4_000_000 + b'""]}', 2),
    "100 MB": (b'"' + b"x" * 100_000_000 + b'"', 2),
    "sections are text": (encode({**make(), "sections": "x"}), 1),
    "sections are null": (encode({**make(), "sections": None}), 1),
    "a section is a list": (encode({**make(), "sections": [[]] * 11}), 1),
    "records are objects": (encode({**make(), "sections": [{"name": "payment", "records": {}}]}), 1),
    "the manifest is text": (encode({**make(), "manifest": "x"}), 1),
    "the signature is text": (encode({**make(), "signature": "x"}), 1),
    "UTF-16": (encode(make()).decode().encode("utf-16"), 2),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(1_000), 2),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_gets_a_clear_message(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, code = HOSTILE[kind]
    path = tmp_path / "hostile.json"
    path.write_bytes(content)
    assert command.run(["verify", str(path), "--trust", KEY]) == code
    said = capsys.readouterr()
    assert said.out.startswith("NOT VALID" if code == 1 else "NOT READABLE")
    assert len(said.out) < 300
    assert "\x1b" not in said.out


BOUNDED = """
import sys
from apps.finance.dossier import command
code = command.run(["verify", sys.argv[1], "--trust", sys.argv[2]])
with open("/proc/self/status") as status:  # ru_maxrss would be that of whoever started us, if that was more
    print("PEAK", next(line for line in status if line.startswith("VmHWM")).split()[1])
sys.exit(code)
"""


@pytest.mark.parametrize("kind", ["deep", "many parts", "many strings", "quotes", "escapes", "100 MB", "huge number"])
def test_a_hostile_file_takes_little_memory_and_time(kind: str, tmp_path: Path) -> None:
    """In a process of its own, without a database and without settings."""
    content, code = HOSTILE[kind]
    path = tmp_path / "hostile.json"
    path.write_bytes(content)
    env = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"], "DULY_ENV": "production"}
    ended = subprocess.run(
        [sys.executable, "-c", BOUNDED, str(path), KEY], env=env, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    peak_kib = int(ended.stdout.split("PEAK ")[1])
    assert peak_kib < 400 * 1024, f"{peak_kib} KiB"


def test_what_is_not_there_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "nobody", Path("/dev/zero"), Path("a\0b")):
        assert command.run(["verify", str(path), "--trust", KEY]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_dossier_that_lacks_something_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from apps.finance.dossier.model import Missing, Why

    path = tmp_path / "cut.json"
    cut = make({"events": []}, missing={"events": [Missing("events from the beginning on", Why.RETENTION)]})
    path.write_bytes(encode(cut))
    assert command.run(["verify", str(path), "--trust", KEY]) == 0
    said = capsys.readouterr().out
    assert "NOT COMPLETE" in said
    assert "events: events from the beginning on (retention)" in said


# -- keys ------------------------------------------------------------------------------------------------------------


def test_in_development_a_key_is_made_that_only_its_owner_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("DULY_DATA", str(tmp_path))
    assert command.run(["key"]) == 0
    first = capsys.readouterr().out
    assert command.run(["key"]) == 0
    assert capsys.readouterr().out == first
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
    secret = (tmp_path / FILE).read_text().strip().partition(":")[2]
    assert secret not in first
    assert secret not in repr(Signer.open(Settings(data=tmp_path)))


@pytest.mark.parametrize("given", ["x", "id:AAAA", ":" + base64.b64encode(SEED).decode(), "a b:AAAA", ","])
def test_a_setting_that_is_wrong_is_not_repeated(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(Refused, match=VARIABLE) as refused:
        Signer.open(Settings())
    assert given not in str(refused.value) or len(given) < 2


def test_in_production_there_is_no_key_that_nobody_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(Refused, match=VARIABLE):
        Signer.open(Settings(env="production"))


def test_the_newest_key_signs_and_all_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"{id}:{base64.b64encode(seed).decode()}" for id, seed in (("new", OTHER), ("old", SEED))]
    monkeypatch.setenv(VARIABLE, ", ".join(keys))
    signer = Signer.open(Settings(env="production"))
    signature: dict[str, Any] = signer.sign("0" * 64)
    assert signature["keyId"] == "new"
    assert list(signer.public_keys()) == ["new", "old"]
    assert signer.public_keys()["old"] == KEY


def test_the_command_is_installed() -> None:
    scripts = (ROOT / "pyproject.toml").read_text()
    assert 'duly-dossier = "apps.finance.dossier.command:main"' in scripts
    assert callable(command.main)
