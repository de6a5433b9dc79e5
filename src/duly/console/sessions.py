"""Who is signed in: a random id in the browser, its hash in the database, and no token anywhere."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from duly.db import Database, Statement, Tx, fetch
from duly.operate.arguments import TEXT_LIMIT
from duly.operate.audit import write_audit

ADMINISTRATOR, OPERATOR = "ADMINISTRATOR", "OPERATOR"
ROLES = frozenset({ADMINISTRATOR, OPERATOR})
LONGEST_HOURS = 8
IDLE_SECONDS = 3_600
TOUCH_SECONDS = 60  # how often being seen is written down: a page that reads should not write each time
ID_LIMIT = 100
SESSION, SIGN_IN = "console:session", "console:sign-in"  # what the audit says that coming and going is about
REFUSALS_AN_HOUR = 60

# clock_timestamp(): a session is about a person at a machine, not about business time.
CREATE_SESSION = Statement("""
INSERT INTO duly.console_sessions (id_hash, subject, name, roles, created_at, seen_at, expires_at)
SELECT CAST(:id_hash AS bytea), CAST(:subject AS text), CAST(:name AS text), CAST(:roles AS text[]), now.at, now.at,
       now.at + make_interval(hours => CAST(:hours AS int))
FROM (SELECT clock_timestamp() AS at) AS now
""")
_ALIVE = """
    revoked_at IS NULL AND expires_at > clock_timestamp()
    AND seen_at > clock_timestamp() - make_interval(secs => CAST(:idle_seconds AS float8))
"""
FIND_SESSION = Statement(
    """
SELECT subject, name, roles, seen_at < clock_timestamp() - make_interval(secs => CAST(:touch_seconds AS float8))
FROM duly.console_sessions WHERE id_hash = CAST(:id_hash AS bytea) AND"""
    + _ALIVE
)
TOUCH_SESSION = Statement("""
UPDATE duly.console_sessions SET seen_at = clock_timestamp()
WHERE id_hash = CAST(:id_hash AS bytea) AND revoked_at IS NULL
""")
FIND_ALIVE_SESSIONS = Statement(
    """
SELECT id_hash FROM duly.console_sessions
WHERE id_hash = ANY(CAST(:id_hashes AS bytea[])) AND"""
    + _ALIVE
)
REVOKE_SESSION = Statement("""
UPDATE duly.console_sessions SET revoked_at = clock_timestamp()
WHERE id_hash = CAST(:id_hash AS bytea) AND revoked_at IS NULL RETURNING subject
""")
# Of one person once an hour, and so many of all: whoever the provider lets in could go on all night. Along
# audit_subject.
NOTE_REFUSAL = Statement("""
WITH lately AS (
    SELECT actor FROM (SELECT actor, at FROM duly.audit WHERE subject = CAST(:subject AS text)
                       ORDER BY id DESC LIMIT CAST(:most AS int)) AS newest
    WHERE at > duly.now() - interval '1 hour'
)
INSERT INTO duly.audit (at, actor, action, subject)
SELECT duly.now(), CAST(:actor AS text), 'console.sign_in_refused', CAST(:subject AS text)
WHERE (SELECT count(*) FROM lately) < CAST(:most AS int)
  AND NOT EXISTS (SELECT 1 FROM lately WHERE actor = CAST(:actor AS text))
""")


@dataclass(frozen=True)
class Session:
    """A person who is signed in. ``csrf`` is what their forms must carry; it comes from the id."""

    id_hash: bytes
    subject: str
    name: str
    roles: frozenset[str]
    csrf: str

    @property
    def may_look(self) -> bool:
        """Whether this person sees the engine's pages, and not only a section of their own."""
        return not ROLES.isdisjoint(self.roles)

    @property
    def may_act(self) -> bool:
        """Whether this person may change anything of the engine."""
        return ADMINISTRATOR in self.roles

    @property
    def actor(self) -> str:
        """How the audit calls them."""
        said = self.subject if self.name == self.subject else f"{self.name} ({self.subject})"
        return said if len(said) <= TEXT_LIMIT else self.subject[:TEXT_LIMIT]


async def create_session(
    db: Database, *, subject: str, name: str, roles: Iterable[str], replaces: bytes | None = None
) -> str:
    """Sign a person in, with the roles that matter here; the id for their browser, which is new at each sign-in.

    What that browser had before ends in the same commit, which also says in the audit who came and went.
    """
    id = secrets.token_urlsafe(32)
    held = sorted(set(roles))
    async with db.transaction() as tx:
        if replaces is not None:
            await _revoke(tx, replaces)
        await fetch(
            tx, CREATE_SESSION, id_hash=hash_id(id), subject=subject, name=name, roles=held, hours=LONGEST_HOURS
        )
        await write_audit(tx, actor=subject, action="console.signed_in", subject=SESSION)
    return id


async def find_session(db: Database, id: str, *, is_seen: bool = True) -> Session | None:
    """The session of a browser, unless it has ended, was revoked, or was left alone for too long.

    A page that asks by itself is no sign of a person: then nobody ``is_seen``.
    """
    if not 0 < len(id) <= ID_LIMIT:
        return None
    id_hash = hash_id(id)
    async with db.transaction() as tx:
        rows = await fetch(tx, FIND_SESSION, id_hash=id_hash, idle_seconds=IDLE_SECONDS, touch_seconds=TOUCH_SECONDS)
        if not rows:
            return None
        subject, name, roles, is_stale = rows[0]
        if is_stale and is_seen:
            await fetch(tx, TOUCH_SESSION, id_hash=id_hash)
    return Session(id_hash, subject, name, frozenset(roles), _csrf(id))


async def find_alive(db: Database, id_hashes: Sequence[bytes]) -> frozenset[bytes]:
    """Which of these sessions are still good."""
    async with db.transaction() as tx:
        rows = await fetch(tx, FIND_ALIVE_SESSIONS, id_hashes=list(id_hashes), idle_seconds=IDLE_SECONDS)
    return frozenset(bytes(row[0]) for row in rows)


async def revoke_session(db: Database, id_hash: bytes) -> None:
    """Sign out: in force at the next request, and at the next tick of every live page."""
    async with db.transaction() as tx:
        await _revoke(tx, id_hash)


async def note_refusal(db: Database, subject: str) -> None:
    """Write down that somebody whom the provider knows has no role here; a flood of them leaves a bounded record."""
    async with db.transaction() as tx:
        await fetch(tx, NOTE_REFUSAL, actor=subject[:TEXT_LIMIT], subject=SIGN_IN, most=REFUSALS_AN_HOUR)


def hash_id(id: str) -> bytes:
    """What the database holds."""
    return hashlib.sha256(id.encode()).digest()


async def _revoke(tx: Tx, id_hash: bytes) -> None:
    for (subject,) in await fetch(tx, REVOKE_SESSION, id_hash=id_hash):
        await write_audit(tx, actor=subject, action="console.signed_out", subject=SESSION)


def _csrf(id: str) -> str:
    return hmac.new(id.encode(), b"duly console csrf", hashlib.sha256).hexdigest()
