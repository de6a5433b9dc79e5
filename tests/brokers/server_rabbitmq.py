"""RabbitMQ for tests, from Debian's packages: a node of our own, with its own data, cookie, ports and epmd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage, AbstractQueue

from tests.brokers.servers import Absent, Foreign, Kind, ProcessServer, Raw, Server, free_port, listens, wait_until

BIN = Path("/usr/lib/rabbitmq/bin")
START_SECONDS = 300.0
CALL_SECONDS = 60.0
INSTALL_SECONDS = 900.0
HOW = "RabbitMQ: apt-get install rabbitmq-server (its service need not run), or go without it: LEAVE_OUT=rabbitmq"
USER, PASSWORD = "duly", "a-password-of-tests"
EXCHANGE = "duly.events"
TOPIC = "duly-topic"
AT_ONCE = 1_000


def install() -> None:
    """Debian's packages, where they are absent; their service is not started."""
    if (BIN / "rabbitmq-server").exists():
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Absent(HOW)
    policy = Path("/usr/sbin/policy-rc.d")  # asked by packages before they start what they bring
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    quietly = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        for command in (["update"], ["install", "-y", "--no-install-recommends", "rabbitmq-server"]):
            done = subprocess.run(
                ["apt-get", "-qq", *command], env=quietly, capture_output=True, text=True, timeout=INSTALL_SECONDS
            )
            if done.returncode != 0:
                raise Absent(f"{HOW}; apt-get says: {' '.join(done.stderr.split())[-500:]}")
    except subprocess.TimeoutExpired:
        raise Absent(f"{HOW}; apt-get says nothing for {INSTALL_SECONDS:.0f} seconds") from None
    finally:
        if ours:
            policy.unlink()


class RabbitMQServer(ProcessServer):
    """One node."""

    name = "rabbitmq"
    start_seconds = START_SECONDS

    def __init__(self, directory: Path) -> None:
        if not (BIN / "rabbitmq-server").exists():
            raise Absent(
                "RabbitMQ: apt-get install -y rabbitmq-server; `make test-brokers` does, and starts no service"
            )
        super().__init__(directory)
        self._distribution_port, self._epmd_port = free_port(), free_port()
        self._epmd: subprocess.Popen[bytes] | None = None
        self._write_files()

    @property
    def url(self) -> str:
        """Where it listens, with a user that may do everything."""
        return f"amqp://{USER}:{PASSWORD}@127.0.0.1:{self.port}/"

    def command(self) -> Sequence[str]:
        """The node itself: told that it is watched, its script makes no child of it."""
        given = (f"{name}={value}" for name, value in self._environment().items())
        return ["env", "-i", *given, "RUNNING_UNDER_SYSTEMD=true", str(BIN / "rabbitmq-server")]

    def start(self) -> None:
        """Start it and its epmd, which maps names of nodes to ports and would else be everybody's."""
        if self._epmd is None or self._epmd.poll() is not None:
            command = ["epmd", "-address", "127.0.0.1", "-port", str(self._epmd_port)]
            self._epmd = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_until(lambda: listens(self._epmd_port), START_SECONDS, "epmd does not start")
        super().start()

    def answers(self) -> bool:
        """It greets whoever speaks AMQP."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as line:
            line.settimeout(1)
            line.sendall(b"AMQP\x00\x00\x09\x01")
            return line.recv(1) == b"\x01"
        return False

    def close(self) -> None:
        """The end of it, and of its epmd."""
        super().close()
        if self._epmd is not None:
            self._epmd.send_signal(signal.SIGKILL)
            self._epmd.wait()
            self._epmd = None

    def evaluate(self, expression: str) -> str:
        """What an Erlang expression is worth inside the node: what ``rabbitmqctl`` does, without its minute."""
        cookie = (self.directory / ".erlang.cookie").read_text()
        done = subprocess.run(
            ["erl_call", "-sname", self._environment()["RABBITMQ_NODENAME"], "-c", cookie, "-e"],
            env=self._environment(),
            input=expression + "\n",
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
        )
        found = re.fullmatch(r"\{ok, (.*)\}", done.stdout.strip(), re.DOTALL)
        assert found, done.stdout + done.stderr
        return found[1]

    def _write_files(self) -> None:
        for name in ("mnesia", "log", "generated"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        cookie = self.directory / ".erlang.cookie"
        cookie.write_text("TESTS" + os.urandom(8).hex().upper())
        cookie.chmod(0o400)
        (self.directory / "enabled_plugins").write_text("[].\n")
        (self.directory / "environment").write_text("")
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.local = 127.0.0.1:{self.port}\n"
            f"default_user = {USER}\ndefault_pass = {PASSWORD}\n"
            "disk_free_limit.absolute = 10MB\nlog.console = true\nlog.console.level = warning\nlog.file = false\n"
        )

    def _environment(self) -> dict[str, str]:
        at = self.directory
        return {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(at),  # where its cookie is
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_CRASH_DUMP_SECONDS": "0",
            "RABBITMQ_NODENAME": f"duly{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(at / "mnesia"),
            "RABBITMQ_LOG_BASE": str(at / "log"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(at / "generated"),
            "RABBITMQ_CONFIG_FILE": str(at / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(at / "environment"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(at / "enabled_plugins"),
            "RABBITMQ_PID_FILE": str(at / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none",
        }


class RabbitForeign:
    """A plain AMQP client: a queue of its own behind the exchange, which keeps what came while it was away."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: AbstractConnection | None = None
        self._channel: AbstractChannel | None = None
        self._topic = ""
        self._seen: list[Raw] = []

    async def _open(self) -> AbstractChannel:
        if self._channel is None or self._channel.is_closed:
            await self._hang_up()
            self._connection = await aio_pika.connect(self._url, timeout=30)
            self._channel = self._connection.channel(on_return_raises=True)
            await self._channel.initialize()
        return self._channel

    async def _queue(self) -> AbstractQueue:
        return await (await self._open()).declare_queue(f"stranger.{self._topic}", durable=True)

    async def watch(self, topic: str) -> None:
        """Bind a queue to everything; what is of other topics is left out when it is read."""
        self._topic = topic
        exchange = await (await self._open()).declare_exchange(EXCHANGE, "topic", durable=True)
        await (await self._queue()).bind(exchange, routing_key="#")

    async def read(self, count: int, *, seconds: float = 30.0) -> list[Raw]:
        """What is in it."""
        queue = await self._queue()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self._seen) < count:
                    message = await queue.get(no_ack=True, fail=False)
                    if message is None:
                        await asyncio.sleep(0.05)
                    elif message.headers.get(TOPIC) == self._topic:
                        self._seen.append(_as_raw(message))
        return list(self._seen)

    async def write(self, topic: str, type_: str, messages: Sequence[Raw]) -> None:
        """Publish with the type as routing key and the topic as a header, and wait for each confirm."""
        exchange = await (await self._open()).get_exchange(EXCHANGE, ensure=False)
        for message in messages:
            await exchange.publish(_as_mail(message, topic), type_, mandatory=True, timeout=10)

    async def flood(self, topic: str, type_: str, messages: Sequence[Raw]) -> None:
        """A thousand at a time; their confirms come in any order."""
        exchange = await (await self._open()).get_exchange(EXCHANGE, ensure=False)
        for first in range(0, len(messages), AT_ONCE):
            wave = messages[first : first + AT_ONCE]
            mails = (exchange.publish(_as_mail(one, topic), type_, mandatory=True, timeout=60) for one in wave)
            await asyncio.gather(*mails)

    async def close(self) -> None:
        """Hang up, and take the queue away."""
        if self._topic and self._channel is not None and not self._channel.is_closed:
            await self._channel.queue_delete(f"stranger.{self._topic}")
        await self._hang_up()

    async def _hang_up(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            await connection.close()


def _as_mail(message: Raw, topic: str) -> aio_pika.Message:
    headers = {name: value for name, value in message.headers.items() if name.lower() != "content-type"}
    content_type = next((text for name, text in message.headers.items() if name.lower() == "content-type"), None)
    return aio_pika.Message(message.body, headers={**headers, TOPIC: topic}, content_type=content_type, delivery_mode=2)


def _as_raw(message: AbstractIncomingMessage) -> Raw:
    headers = {name.lower(): str(value) for name, value in message.headers.items()}
    if message.content_type:
        headers["content-type"] = message.content_type
    return Raw(headers, message.body)


def _make(directory: Path) -> Server:
    return RabbitMQServer(directory)


def _url(server: Server) -> str:
    """As ``RabbitMQServer.url``; and who stands still has lost its turn sooner, for those that wait for it."""
    assert isinstance(server, RabbitMQServer)
    return f"{server.url}?heartbeat=3"


def _foreign(server: Server) -> Foreign:
    assert isinstance(server, RabbitMQServer)
    return RabbitForeign(server.url)


KIND = Kind(
    "rabbitmq",
    _make,
    _url,
    _foreign,
    binding="cloudEvents:",
    restart_seconds=120.0,
    refuses_absent_topics=False,  # a check binds the topic: nobody can ask whether it is bound
)
