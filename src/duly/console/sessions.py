"""Who is signed in: a random id in the browser, its hash in the database, and no token anywhere."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from duly.db import Database, Statement, fetch
from duly.operate.arguments import TEXT_LIMIT

ADMINISTRATOR, OPERATOR = "ADMINISTRATOR", "OPERATOR"
ROLES = frozenset({ADMINISTRATOR, OPERATOR})
LONGEST_HOURS = 8
IDLE_SECONDS = 3_600
TOUCH_SECONDS = 60  # how often being seen is written down: a page that reads should not write each time
ID_LIMIT = 100

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
WHERE id_hash = CAST(:id_hash AS bytea) AND revoked_at IS NULL
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


async def create_session(db: Database, *, subject: str, name: str, roles: Iterable[str]) -> str:
    """Sign a person in, with the roles that matter here; the id for their browser, which is new at each sign-in."""
    id = secrets.token_urlsafe(32)
    held = sorted(set(roles))
    async with db.transaction() as tx:
        await fetch(
            tx, CREATE_SESSION, id_hash=hash_id(id), subject=subject, name=name, roles=held, hours=LONGEST_HOURS
        )
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
        await fetch(tx, REVOKE_SESSION, id_hash=id_hash)


def hash_id(id: str) -> bytes:
    """What the database holds."""
    return hashlib.sha256(id.encode()).digest()


def _csrf(id: str) -> str:
    return hmac.new(id.encode(), b"duly console csrf", hashlib.sha256).hexdigest()
