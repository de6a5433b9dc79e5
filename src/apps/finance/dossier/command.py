"""The command ``duly-dossier``: export one, check one without a database, and say which public keys are ours."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy.exc import DBAPIError

from apps.finance.dossier.model import EXIT_CODES, MOST_BYTES, Outcome, Verdict, check, read_public_key
from apps.finance.dossier.signing import Signer
from apps.shared.canonical import encode
from duly.errors import DulyError, NotFound
from duly.settings import Settings

UNREADABLE = EXIT_CODES[Outcome.UNREADABLE]
WORDS = {
    Outcome.VALID: "VALID", Outcome.FORGED: "NOT VALID", Outcome.UNREADABLE: "NOT READABLE",
    Outcome.SIGNER_UNKNOWN: "SIGNER UNKNOWN",
}  # fmt: skip


def main() -> None:
    """The command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """0: valid. 1: not what was signed, or signed by somebody else. 2: cannot be read, or done. 3: signer unknown."""
    given = _read_arguments(arguments)
    if given.command == "verify":
        return verify(given.file, given.trust or [])
    try:
        if given.command == "key":
            for key_id, key in Signer.open(Settings()).public_keys().items():
                _say(f"{key_id}:{key}")
            return 0
        return _export(given.payment, given.out, given.actor)
    except NotFound as absent:
        _complain(str(absent))
    except (DulyError, ValidationError, OSError, DBAPIError) as error:
        _complain(str(error) if isinstance(error, DulyError) else f"it could not be done: {type(error).__name__}")
    return UNREADABLE


def verify(file: Path, trust: Sequence[str]) -> int:
    """Check a file, and say what came of it. Nothing that it says is shown but ids and words of ours."""
    try:
        trusted = [read_public_key(one) for one in trust if one.strip()]
    except ValueError as error:
        _complain(str(error))
        return UNREADABLE
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        _complain(f"the file cannot be read: {type(error).__name__}")
        return UNREADABLE
    verdict = check(content, trusted=trusted)
    _describe(verdict)
    return EXIT_CODES[verdict.outcome]


def _describe(verdict: Verdict) -> None:
    _say(f"{WORDS[verdict.outcome]}: {verdict.reason}")
    if verdict.outcome not in (Outcome.VALID, Outcome.SIGNER_UNKNOWN):
        return
    _say(f"payment {_show(verdict.payment_id)}, signed with the key {verdict.key_id}")
    _say(", ".join(f"{count} {name}" for name, count in verdict.counts.items()))
    if verdict.is_complete:
        _say("complete: nothing is missing")
    else:
        _say("NOT COMPLETE, and it says so; missing:")
        for line in verdict.missing:
            _say(f"  {_show(line)}")
    if verdict.outcome is Outcome.SIGNER_UNKNOWN:
        _say("give --trust with the public key of whoever should have signed it (duly-dossier key)")


def _export(payment: UUID, out: Path | None, actor: str | None) -> int:
    content = asyncio.run(_make(payment, actor))
    if out is None:
        _say(content.decode())
    else:
        out.write_bytes(content + b"\n")
    return 0


async def _make(payment: UUID, actor: str | None) -> bytes:
    # Only here, so that a check needs nothing but a file.
    from apps.finance.dossier.service import make_dossier, record_export
    from duly.cli.home import database_address
    from duly.cli.process import open_database
    from duly.cli.shell import os_user

    settings = Settings()
    with database_address(settings) as dsn:
        async with open_database(dsn, settings) as db:
            async with db.transaction() as tx:
                made = await make_dossier(tx, payment, Signer.open(settings))
            await db.run(lambda tx: record_export(tx, made, actor=actor or os_user()))
            return encode(made)


def _read_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="duly-dossier", description="Dossiers of payments.")
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("verify", help="check a dossier; needs no database and no network")
    checking.add_argument("file", type=Path)
    checking.add_argument(
        "--trust", action="append", metavar="KEY", help="a public key, as `duly-dossier key` writes it"
    )
    making = commands.add_parser("export", help="write the dossier of a payment")
    making.add_argument("payment", type=UUID)
    making.add_argument("--out", type=Path, help="a file; without it, the standard output")
    making.add_argument("--actor", help="who does this, for the audit; without it, the user of the machine")
    commands.add_parser("key", help="the public keys of this installation, the newest first")
    return parser.parse_args(arguments)


def _show(text: str) -> str:
    """A stranger's words on one line of a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])


def _say(line: str) -> None:
    sys.stdout.write(line.encode("utf-8", "replace").decode() + "\n")


def _complain(line: str) -> None:
    sys.stderr.write(f"duly-dossier: {line}\n")
