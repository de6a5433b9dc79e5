"""What one cell of the matrix works with: a database, processes, a broker, clients, and questions to all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx2
import psycopg
from psycopg import sql

from apps.wiring import app as application
from duly.runtime.migrate import migrate_all
from duly.testing import TestServer
from tests.crashes import shop
from tests.crashes.checker import Answer, Effect, Facts, Run
from tests.crashes.process import Order, start
from tests.engine.idempotency.shop import TABLES as SHOP_TABLES
from tests.engine.outbox.broker import Broker

POLL_SECONDS = 0.02
CLIENT_SECONDS = 3.0
SCHEMA = """
SELECT 'column', table_schema || '.' || table_name || '.' || column_name, data_type || is_nullable
FROM information_schema.columns WHERE table_schema NOT IN ('pg_catalog', 'information_schema')
UNION ALL SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname NOT IN ('pg_catalog')
UNION ALL SELECT 'constraint', conrelid::regclass::text || conname, pg_get_constraintdef(oid)
          FROM pg_constraint WHERE connamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema')
UNION ALL SELECT 'function', oid::regprocedure::text, md5(prosrc) FROM pg_proc
          WHERE pronamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema')
UNION ALL SELECT 'trigger', tgrelid::regclass::text || tgname, '' FROM pg_trigger WHERE NOT tgisinternal
ORDER BY 1, 2, 3
"""
VERSIONS = """
SELECT 'engine', version_num FROM duly.schema_version UNION ALL
SELECT 'application', version_num FROM duly.schema_version_apps UNION ALL
SELECT 'schedule', name FROM duly.schedules ORDER BY 1, 2
"""
RUNS = """
SELECT job_id, outcome, lease_token, retry_count, name, coalesce(entity_id, ''), event_id::text
FROM duly.executions ORDER BY completed_at, lease_token
"""
QUEUED = "SELECT id, name, lease_token IS NOT NULL FROM duly.jobs"
_reference: list[Any] = []
_reference_lock = threading.Lock()


class _Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class Overdue(AssertionError):
    """Something did not happen within its bound."""


class Bench:
    """One database, and what works on it. Whatever was started is ended with it."""

    def __init__(self, server: TestServer, dsn: str, directory: Path) -> None:
        self.server = server
        self.dsn = dsn
        self.directory = directory
        self.broker: Broker | None = None
        self.let_through: set[str] = set()  # aggregates that the broker was told to refuse for long enough
        self.processes: dict[str, BaseProcess] = {}
        self._receiver: ThreadingHTTPServer | None = None
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._ports: list[int] = []
        self._answers: list[Answer] = []
        self._clients: threading.Thread | None = None
        self._is_over = threading.Event()

    # -- the database -------------------------------------------------------------------------------------------

    def rows(self, query: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Ask."""
        cursor = self._connection.execute(query.encode(), values)
        return cursor.fetchall() if cursor.description else []

    def value(self, query: str, values: Mapping[str, Any] | None = None) -> Any:
        """The first column of the first row."""
        return self.rows(query, values)[0][0]

    def terminate(self, which: str) -> int:
        """End the server's side of these connections; how many."""
        return len(
            self.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                f" WHERE datname = current_database() AND pid <> pg_backend_pid() AND ({which})"
            )
        )

    def schema(self) -> list[Any]:
        """Everything a migration makes, as far as it came."""
        is_complete = self.value("SELECT to_regclass('duly.schema_version_apps') IS NOT NULL")
        return [*self.rows(SCHEMA), *(self.rows(VERSIONS) if is_complete else [])]

    def reference_schema(self) -> list[Any]:
        """The same of a database that was migrated in peace."""
        with _reference_lock:
            if not _reference:
                with fresh_database(self.server) as dsn:
                    migrate_all(dsn, application)
                    with contextlib.closing(Bench(self.server, dsn, self.directory)) as other:
                        _reference.extend(other.schema())
        return _reference

    # -- processes ----------------------------------------------------------------------------------------------

    def start(self, name: str, order: Order) -> BaseProcess:
        """Start a process; an api is one that the clients know from then on."""
        Path(order.log).touch()
        process = self.processes[name] = start(order)
        if order.duties == ("api",):
            until(lambda: order.port_file.exists() and order.port_file.read_text(), 10, f"{name} has a port")
            self._ports.insert(0, int(order.port_file.read_text()))
        return process

    def end(self, name: str, seconds: float) -> int | None:
        """Ask a process to end, once it listens to signals, and wait; its exit code, None if it had to be killed."""
        process, log = self.processes[name], self.directory / f"{name}.log"
        until(lambda: not process.is_alive() or '"process_up"' in log.read_text(), seconds, f"{name} is up")
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGTERM)
        return self.wait(name, seconds)

    def wait(self, name: str, seconds: float) -> int | None:
        """Wait for a process that ends by itself."""
        process = self.processes[name]
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return None
        if process.exitcode == 255 and '"process_down"' in (self.directory / f"{name}.log").read_text():
            return 0  # it went well; multiprocessing lost the code on its way
        return process.exitcode

    def close(self) -> None:
        """End everything."""
        self._is_over.set()
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()
        if self._clients is not None:
            self._clients.join(2 * CLIENT_SECONDS)
        if self.broker is not None:
            self.broker.close()
        if self._receiver is not None:
            self._receiver.shutdown()
            self._receiver.server_close()
        self._connection.close()

    # -- a broker and clients -----------------------------------------------------------------------------------

    def open_broker(self) -> None:
        """A broker for the relays."""
        self.broker = Broker(self.directory / "journal.jsonl")
        self.broker.start()

    def open_receiver(self) -> str:
        """A receiver of webhooks that takes everything; its address."""
        self._receiver = ThreadingHTTPServer(("127.0.0.1", 0), _Taking)
        threading.Thread(target=self._receiver.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._receiver.server_port}/"

    def refuse(self, refused: dict[str, str]) -> None:
        """Which aggregates the broker refuses from now on."""
        assert self.broker is not None
        self.broker.rules.refuse = refused

    def make_shop(self) -> None:
        """What the routes write to."""
        self.rows(SHOP_TABLES)

    def ask(self, requests: list[str], *, keyed: bool) -> None:
        """Clients that send these requests, one after the other, as soon as there is somebody to ask."""
        self._clients = threading.Thread(target=self._ask, args=(requests, keyed), daemon=True)
        self._clients.start()

    def _ask(self, requests: list[str], keyed: bool) -> None:
        for request in requests:
            headers = {"X-Caller": request} | ({"Idempotency-Key": f"key-{request}"} if keyed else {})
            repeated = 0
            while not self._is_over.is_set() and repeated < 2:
                answer = self._post(request, headers)
                if answer is None:
                    continue
                self._answers.append(answer)
                if not keyed:
                    break
                is_final = answer.status is not None and answer.status < 500
                repeated += is_final  # once more: the same answer must come
                if not is_final:
                    time.sleep(POLL_SECONDS)

    def _post(self, request: str, headers: dict[str, str]) -> Answer | None:
        """One try with whoever came last; None when there was nobody to ask."""
        for port in list(self._ports):
            try:
                reply = httpx2.post(
                    f"http://127.0.0.1:{port}/orders", json={"sku": "a"}, headers=headers, timeout=CLIENT_SECONDS
                )
            except httpx2.ConnectError:
                continue
            except httpx2.TransportError:
                return Answer(request, None)
            return Answer(request, reply.status_code, reply.text)
        time.sleep(POLL_SECONDS)
        return None

    @property
    def clients_done(self) -> bool:
        """Whether every client has its answer, or none is coming."""
        return self._clients is None or not self._clients.is_alive()

    # -- what was found -----------------------------------------------------------------------------------------

    def read_facts(self) -> Facts:
        """Everything the checker looks at, but for how the cell went; all of one moment."""
        with self._connection.transaction():
            self._connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            return self._read_facts()

    def _read_facts(self) -> Facts:
        if self.value("SELECT to_regclass('effects') IS NULL"):
            return Facts(schema=self.schema())
        found = Facts(
            jobs=[(row[0], row[1], row[2]) for row in self.rows(QUEUED)],
            runs=[Run(*row) for row in self.rows(RUNS)],
            dead=[(row[0], row[1]) for row in self.rows("SELECT id, entity_id FROM duly.dead_letters")],
            effects=[Effect(*row) for row in self.rows("SELECT kind, key, n FROM effects ORDER BY id")],
            outbox=[row[0] for row in self.rows("SELECT id::text FROM duly.outbox")],
            history=[row[0] for row in self.rows("SELECT id::text FROM duly.events")],
            inbox=[(row[0], row[1]) for row in self.rows("SELECT consumer, event_id::text FROM duly.processed_events")],
            occurrences=[
                (row[0], row[1]) for row in self.rows("SELECT name, due_at::text FROM duly.jobs WHERE name LIKE 's%'")
            ],
            answers=self._answers,
        )  # fmt: skip
        if self._clients is not None:
            found.orders = [(row[0], row[1]) for row in self.rows("SELECT caller, id FROM orders")]
        if self.broker is not None:
            found.received = [(one.aggregate, one.n) for one in self.broker.received()]
        return found


def until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Poll for what another process or server does; the bound is a failure, never a measure of time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Overdue(f"did not happen within {seconds:g} s: {what}")
        time.sleep(POLL_SECONDS)


def is_stopped(process: BaseProcess) -> bool:
    """Whether it stands still, as Linux sees it."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def fresh_database(server: TestServer) -> Iterator[str]:
    """An empty database."""
    name = f"t_{uuid.uuid4().hex[:16]}"
    with psycopg.connect(server.postgres.dsn("postgres"), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield server.postgres.dsn(name)
        finally:
            admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


@contextlib.contextmanager
def open_bench(server: TestServer, directory: Path, *, empty: bool) -> Iterator[Bench]:
    """A bench with a database of its own: empty, or migrated and with the shop's tables."""
    with fresh_database(server) if empty else server.database() as dsn:
        bench = Bench(server, dsn, directory)
        try:
            if not empty:
                bench.rows(shop.TABLES)
            yield bench
        finally:
            bench.close()
