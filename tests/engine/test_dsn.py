"""A password is never shown: not where an address is, not in an error of connecting, not in a log."""

from __future__ import annotations

import asyncio
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import sql
from sqlalchemy import text

from duly.db import Database, describe_error, normal_dsn, safe_dsn
from duly.errors import Refused
from duly.runtime.migrate import migrate
from duly.testing import TestServer
from tests.engine.cli.commands import duly, environment, wait_until
from tests.support import finish, python, rows

CANARY = "c4n4ry"
SPECIAL = f"p@s/s?{CANARY}#[:]%&=+ é'\\"
CANNOT_BE_READ = "an address that cannot be read"
READABLE = {
    f"postgresql://u:{CANARY}@h/db": "host=h dbname=db user=u",
    f"postgres://u:{CANARY}@h:5433/db": "host=h port=5433 dbname=db user=u",
    f"postgresql+asyncpg://u:{CANARY}@h/db": "host=h dbname=db user=u",
    f"postgresql+psycopg://u:{CANARY}@h/db": "host=h dbname=db user=u",
    f"  postgresql://u:{CANARY}@h/db\n": "host=h dbname=db user=u",
    f"postgresql://u:{quote(SPECIAL, safe='')}@h/db": "host=h dbname=db user=u",
    f"postgresql://u:a:{CANARY}!$*()~@h/db": "host=h dbname=db user=u",
    f"postgresql://u%40corp:{CANARY}@h/db": "host=h dbname=db user=u@corp",
    f"postgresql://:{CANARY}@h/db": "host=h dbname=db",
    f"postgresql://h/db?user=u&password={CANARY}": "host=h dbname=db user=u",
    f"postgresql://h/db?user=u@corp&password={CANARY}": "host=h dbname=db user=u@corp",
    f"postgresql://u@/db?host=/run/postgres&password={CANARY}": "host=/run/postgres dbname=db user=u",
    f"postgresql://u@h/db?sslpassword={CANARY}&passfile=/{CANARY}": "host=h dbname=db user=u",
    f"postgresql://u:{CANARY}@a:1,b:2/db": "host=a,b port=1,2 dbname=db user=u",
    f"postgresql://u:{CANARY}@a,b/db?target_session_attrs=read-write": "host=a,b port=, dbname=db user=u",
    f"postgresql://u:{CANARY}@[::1]:5432/db": "host=::1 port=5432 dbname=db user=u",
    f"postgresql://u:{CANARY}@[2001:db8::1],[::1]:2/db": "host=2001:db8::1,::1 port=,2 dbname=db user=u",
    f"host=h port=1 user=u password={CANARY} dbname=db": "host=h port=1 dbname=db user=u",
    f"host=h password='{CANARY} \\' {CANARY}' dbname=db": "host=h dbname=db",
    f"password = {CANARY} host = h": "host=h",
    f"password={CANARY}": "what the PG* variables say",
    "postgresql://u@h/db": "host=h dbname=db user=u",
    "postgresql:///db": "dbname=db",
    "postgresql://": "what the PG* variables say",
    "": "what the PG* variables say",
}
MISREAD = [  # each driver finds the end of the password elsewhere; what is left over it takes for a host or a port
    f"postgresql://u:x@{CANARY}@h/db",
    f"postgresql://u:{CANARY}@x@h/db",
    f"postgresql://u:12/{CANARY}@h/db",
    f"postgresql://u:{CANARY}/12@h/db",
    f"postgresql://u:{CANARY}?x@h/db",
    f"postgresql://u:12?{CANARY}@h/db",
    f"postgresql://u:{CANARY}#x@h/db",
    f"postgresql://u:12#{CANARY}@h/db",
    f"postgresql://u:[{CANARY}]@h/db",
    f"postgresql://u:]{CANARY}@h/db",
    f"postgresql+asyncpg://u:12/{CANARY}@h/db",
    f"postgresql://u:\udcff{CANARY}@h/db",
    f"postgresql://u:x\n{CANARY}@h/db",
    f"postgresql://h:{CANARY}/db",
]
UNREADABLE = [
    *MISREAD,
    f"postgresql://u:%zz{CANARY}@h/db",
    f"postgresql://u@h/db?passwort={CANARY}",
    f"mysql://u:{CANARY}@h/db",
    f"host=h password=x {CANARY}",
    f"host=h password='{CANARY}",
    f"host=h PASSWORD={CANARY}",
    f"dbname=postgresql://u:{CANARY}@h/db",
    CANARY,
]


@pytest.mark.parametrize(("dsn", "shown"), READABLE.items(), ids=READABLE.values())
def test_where_the_database_is_can_be_said_without_its_password(dsn: str, shown: str) -> None:
    assert safe_dsn(dsn) == shown
    assert CANARY not in shown


@pytest.mark.parametrize("dsn", UNREADABLE, ids=ascii)
def test_an_address_that_may_be_misread_is_not_shown_at_all(dsn: str) -> None:
    assert ascii(safe_dsn(dsn)) == ascii(CANNOT_BE_READ)


any_text = st.text(alphabet=":/?#@[]%&=,+ a1é'\"\\", max_size=8)  # whatever ends a part of an address, or quotes it


@given(any_text, any_text)
def test_no_password_shows_however_it_is_written(before: str, after: str) -> None:
    """Percent-encoded it is read as it was meant; bare, it is read so or refused, and in no case shown."""
    password = f"{before}{CANARY}{after}"
    encoded = f"postgresql://u:{quote(password, safe='')}@h:5432/db"
    assert safe_dsn(encoded) == "host=h port=5432 dbname=db user=u"
    assert psycopg.conninfo.conninfo_to_dict(normal_dsn(encoded))["password"] == password
    assert CANARY not in safe_dsn(f"postgresql://u:{password}@h:5432/db")
    assert CANARY not in safe_dsn(f"host=h user=u password={password}")


@pytest.mark.parametrize("dsn", MISREAD, ids=ascii)
def test_an_address_that_may_be_misread_is_refused_in_words_of_our_own(dsn: str) -> None:
    """Before any driver sees it: their errors quote what they took for a port, which is the password."""
    for use in (Database, migrate):
        with pytest.raises(Refused, match="special characters of the password percent-encoded") as refused:
            use(dsn)
        assert CANARY not in ascii(traceback.format_exception(refused.value))


@pytest.mark.parametrize("command", ["migrate", "worker"])
def test_the_command_line_refuses_it_in_one_line(command: str) -> None:
    for dsn in (f"postgresql://u:x@{CANARY}@127.0.0.1:1/db", f"postgresql://u:12?{CANARY}@127.0.0.1:1/db"):
        done = duly(command, env=environment(DATABASE_URL=dsn))
        assert (done.returncode, done.stdout) == (1, "")
        assert "cannot be read" in done.stderr
        assert done.stderr.count("\n") == 1
        assert CANARY not in done.stderr


# -- connecting for real -------------------------------------------------------------------------------------------


@pytest.fixture
def role(server: TestServer, dsn: str) -> Iterator[str]:
    """A role that this server asks for its password, which is full of special characters."""
    name = f"guarded_{uuid.uuid4().hex[:12]}"
    rules = server.postgres.directory / "pg_hba.conf"
    before = rules.read_text()
    rows(dsn, sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(name), SPECIAL).as_string())
    rules.write_text(f"local all {name} scram-sha-256\n{before}")
    rows(dsn, "SELECT pg_reload_conf()")
    wait_until(lambda: is_refused(as_role(dsn, name, "wrong")), seconds=10, what="the server asks for a password")
    yield name
    rules.write_text(before)
    rows(dsn, "SELECT pg_reload_conf()")
    rows(dsn, f"DROP ROLE {name}")


def as_role(dsn: str, role: str, password: str) -> str:
    return dsn.replace("postgres@", f"{role}:{quote(password, safe='')}@", 1)


def is_refused(dsn: str) -> bool:
    try:
        psycopg.connect(dsn).close()
    except psycopg.OperationalError:
        return True
    return False


async def test_a_percent_encoded_password_opens_the_door_to_every_driver(dsn: str, role: str) -> None:
    """So that nobody is refused for having a good password."""
    db = Database(as_role(dsn, role, SPECIAL))
    async with db.transaction() as tx:
        assert (await tx.execute(text("SELECT current_user"))).scalar() == role
    with db.transaction_sync() as session:
        assert session.execute(text("SELECT current_user")).scalar() == role
    await db.close()


def nobody_there(_dsn: str, _role: str) -> str:
    return f"postgresql://someone:{CANARY}@127.0.0.1:1/nothing"


def wrong_password(dsn: str, role: str) -> str:
    return as_role(dsn, role, f"not {CANARY}")


def no_such_database(dsn: str, _role: str) -> str:
    return dsn.replace("postgres@/t_", f"postgres:{CANARY}@/gone_")


def no_such_database_by_query(dsn: str, _role: str) -> str:
    return dsn.replace("/t_", "/gone_") + f"&password={CANARY}"


any_failure = pytest.mark.parametrize(
    "failure", [nobody_there, wrong_password, no_such_database, no_such_database_by_query], ids=lambda f: f.__name__
)
in_a_process = pytest.mark.parametrize("failure", [nobody_there, wrong_password], ids=lambda f: f.__name__)
Failure = Callable[[str, str], str]


async def in_session(db: Database) -> None:
    async with db.transaction() as tx:
        await tx.execute(text("SELECT 1"))


async def in_raw_transaction(db: Database) -> None:
    async with db.raw_transaction():
        pass


async def in_sync_session(db: Database) -> None:
    with db.transaction_sync() as session:
        session.execute(text("SELECT 1"))


async def in_migration(db: Database) -> None:
    await asyncio.to_thread(migrate, db.dsn)


@any_failure
@pytest.mark.parametrize("connect", [in_session, in_raw_transaction, in_sync_session, in_migration])
async def test_an_error_of_connecting_does_not_name_the_password(
    dsn: str, role: str, failure: Failure, connect: Callable[[Database], Any]
) -> None:
    """Neither in the history, where describe_error puts it, nor in a traceback."""
    db = Database(failure(dsn, role))
    with pytest.raises(Exception) as raised:  # noqa: PT011 - each driver has its own
        await connect(db)
    await db.close()
    said = [describe_error(raised.value), *traceback.format_exception(raised.value)]
    assert "Error" in said[0] or "Unavailable" in said[0]
    assert CANARY not in "".join(said)


LOGGING = """
import asyncio, os
from duly import Database, Worker
from duly.telemetry import configure_logging

if os.environ["STYLE"]:
    configure_logging(style=os.environ["STYLE"])

async def main():
    stop = asyncio.Event()
    worker = Worker(Database(os.environ["DATABASE_URL"]), {})
    running = asyncio.create_task(worker.run(stop))
    while worker.health.detail == "starting":
        await asyncio.sleep(0.01)
    print("health:", worker.health.detail)
    stop.set()
    await running

asyncio.run(main())
"""


@in_a_process
@pytest.mark.parametrize("style", ["json", ""], ids=["json", "not configured"])
def test_a_worker_that_cannot_connect_does_not_log_the_password(
    dsn: str, role: str, failure: Failure, style: str
) -> None:
    """Also where nobody has configured the logs: then structlog shows what each frame of a traceback holds."""
    code, written = finish(python(failure(dsn, role), LOGGING, env={"STYLE": style}))
    assert code == 0, written
    assert "duty_down" in written
    assert "health: " in written
    assert CANARY not in written


@in_a_process
@pytest.mark.parametrize("command", ["migrate", "worker"])
def test_a_command_that_cannot_connect_does_not_show_the_password(
    dsn: str, role: str, failure: Failure, command: str
) -> None:
    done = duly(command, env=environment(DATABASE_URL=failure(dsn, role), DULY_ALLOW_UNSAFE_DATABASE="1"))
    assert done.returncode == 1
    assert done.stderr.startswith("duly: ")
    assert CANARY not in done.stdout + done.stderr
