"""Apache Kafka for tests: one broker that is its own controller, from Maven's jars on the machine's Java."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.brokers.servers import Absent, Foreign, Kind, ProcessServer, Raw, Server, free_port, listens, wait_until

POM = Path(__file__).parent / "kafka" / "pom.xml"
JARS = Path(sys.prefix) / "kafka"
FORMATTED = JARS / "formatted"
INSTALL_SECONDS = 600.0
AT_ONCE = 20_000
CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
USER, PASSWORD = "duly", "a-password-of-tests"
JAVA = ["java", "-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
JAVA += ["-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=BROKER://127.0.0.1:{port},GUARDED://127.0.0.1:{guarded},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=BROKER://127.0.0.1:{port},GUARDED://127.0.0.1:{guarded}
inter.broker.listener.name=BROKER
listener.security.protocol.map=BROKER:PLAINTEXT,GUARDED:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
listener.name.guarded.sasl.enabled.mechanisms=PLAIN
listener.name.guarded.plain.sasl.jaas.config={login}
log.dirs={directory}/logs
auto.create.topics.enable=true
num.partitions=1
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
broker.heartbeat.interval.ms=1000
broker.session.timeout.ms=10000
initial.broker.registration.timeout.ms=300000
log.cleaner.dedupe.buffer.size=2097152
log.index.size.max.bytes=65536
"""
LOGIN = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'


def install() -> None:
    """Bring the jars into the virtual environment and format an empty storage, once."""
    if not list(JARS.glob("kafka_2.13-*.jar")):
        _bring_jars()
    if not (FORMATTED / "logs").exists():
        _format_storage()


def _bring_jars() -> None:
    for tool, package in (("java", "openjdk-17-jre-headless"), ("mvn", "maven")):
        if shutil.which(tool) is None:
            raise Absent(f"Kafka: no {tool}; apt-get install {package}, or go without it: LEAVE_OUT=kafka")
    part = JARS.with_name("kafka.part")  # what was cut short is not taken for whole
    shutil.rmtree(part, ignore_errors=True)
    command = ["mvn", "-q", "-B", "-ntp", "-f", str(POM), "dependency:copy-dependencies"]
    _call([*command, "-DincludeScope=runtime", f"-DoutputDirectory={part}"], "Maven could not bring it")
    shutil.rmtree(JARS, ignore_errors=True)
    part.rename(JARS)


def _format_storage() -> None:
    """It depends on no port: the servers copy it, and each saves the start of a Java."""
    part = FORMATTED.with_name("formatted.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    config = part / "server.properties"
    config.write_text(_settings(part, port=9092, guarded=9094, controller=9093))
    command = [*JAVA, "-cp", f"{JARS}/*", "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", str(config)]
    _call(command, "this Java cannot run it (it needs 17 or later)")
    shutil.rmtree(FORMATTED, ignore_errors=True)
    part.rename(FORMATTED)


def _settings(directory: Path, *, port: int, guarded: int, controller: int) -> str:
    return SETTINGS.format(directory=directory, port=port, guarded=guarded, controller=controller, login=LOGIN)


def _call(command: Sequence[str], otherwise: str) -> None:
    """Wait for a program; Absent when it fails, or finds no end."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        said = "" if ended.returncode == 0 else ended.stdout + ended.stderr
    except subprocess.TimeoutExpired:
        said = f"no answer within {INSTALL_SECONDS:.0f} seconds"
    if said:
        raise Absent(f"Kafka: {otherwise} (LEAVE_OUT=kafka goes without): {' '.join(said.split())[-500:]}")


class KafkaServer(ProcessServer):
    """One server; the broker would create topics by itself, as it comes, so ours must not ask for it."""

    name = "kafka"
    start_seconds = 600.0  # five, where the machine has nothing else to do

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        install()
        self.guarded_port = free_port()
        self.config = directory / "server.properties"
        ports = {"port": self.port, "guarded": self.guarded_port, "controller": free_port()}
        self.config.write_text(_settings(directory, **ports))

    @property
    def url(self) -> str:
        """Where it is; setup makes few partitions, for the tests have few aggregates."""
        return f"kafka://127.0.0.1:{self.port}?partitions=3"

    def guarded_url(self, password: str) -> str:
        """Where it asks for a password, for somebody who knows this one."""
        return f"kafka://{USER}:{password}@127.0.0.1:{self.guarded_port}/?partitions=1&sasl.mechanism=PLAIN"

    @property
    def client(self) -> dict[str, str | int | float | bool]:
        """What a plain client needs to know."""
        return {"bootstrap.servers": f"127.0.0.1:{self.port}", "log_level": 0}

    def command(self) -> Sequence[str]:
        """The server with its settings; a little less urgent than the tests, unless they are that already."""
        return ["nice", "-n", str(max(0, 5 - os.nice(0))), *JAVA, "-cp", f"{JARS}/*", "kafka.Kafka", str(self.config)]

    def start(self) -> None:
        """Start it, on storage that was formatted once for all of them."""
        if not (self.directory / "logs").exists():
            shutil.copytree(FORMATTED / "logs", self.directory / "logs")
        try:
            super().start()
        except BaseException:
            self.kill()
            raise

    def wait_until_serving(self) -> None:
        """Until its controller, which is itself, takes it for alive: a client that asks before that waits a minute."""
        wait_until(self.answers, self.start_seconds, "kafka does not serve")

    def answers(self) -> bool:
        """A listener is not enough: it must know itself as a broker."""
        if not listens(self.port):
            return False
        admin = AdminClient(self.client)  # kept until it has answered: its questions end with it
        with contextlib.suppress(KafkaException, TimeoutError):
            return bool(admin.describe_cluster(request_timeout=30).result(40).nodes)
        return False


class KafkaForeign:
    """A plain consumer of no group, and a plain producer."""

    def __init__(self, server: Server) -> None:
        self._client = {"bootstrap.servers": f"127.0.0.1:{server.port}", "log_level": 0}
        self._consumer: Consumer | None = None
        self._producer: Producer | None = None
        self._seen: list[Raw] = []

    async def watch(self, topic: str) -> None:
        """Read every partition of it, from its end."""
        await asyncio.to_thread(self._watch, topic)

    async def read(self, count: int, *, seconds: float = 30.0) -> list[Raw]:
        """What was written since."""
        return await asyncio.to_thread(self._read, count, seconds)

    async def write(self, topic: str, type_: str, messages: Sequence[Raw]) -> None:
        """Send them one after the other."""
        await asyncio.to_thread(self._write, topic, messages, at_once=1)

    async def flood(self, topic: str, type_: str, messages: Sequence[Raw]) -> None:
        """As many at once as fit into the producer's queue."""
        await asyncio.to_thread(self._write, topic, messages, at_once=AT_ONCE)

    async def close(self) -> None:
        """Hang up."""
        for client in (self._consumer, self._producer):
            if client is not None:
                await asyncio.to_thread(client.close)
        self._consumer = self._producer = None

    def _watch(self, topic: str) -> None:
        self._consumer = Consumer(
            {**self._client, "group.id": f"stranger-{time.monotonic_ns()}", "enable.auto.commit": False}
        )
        numbers = self._consumer.list_topics(topic, timeout=30).topics[topic].partitions
        assert numbers, f"there is no topic {topic}"
        self._consumer.assign([TopicPartition(topic, one, self._end_of(TopicPartition(topic, one))) for one in numbers])

    def _end_of(self, partition: TopicPartition) -> int:
        """Where it ends. The broker hears of a new topic a little later than its controller."""
        assert self._consumer is not None
        until = time.monotonic() + 30
        while True:
            try:
                return self._consumer.get_watermark_offsets(partition, timeout=30)[1]
            except KafkaException as error:
                if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION or time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _read(self, count: int, seconds: float) -> list[Raw]:
        assert self._consumer is not None, "watch() comes first"
        ends_at = time.monotonic() + seconds
        while len(self._seen) < count and time.monotonic() < ends_at:
            message = self._consumer.poll(0.2)
            if message is not None and message.error() is None:
                headers = {_text(name).lower(): _text(value) for name, value in list(message.headers() or [])}
                self._seen.append(Raw(headers, message.value() or b"", _text(message.key())))
        return list(self._seen)

    def _write(self, topic: str, messages: Sequence[Raw], *, at_once: int) -> None:
        errors: list[object] = []
        if self._producer is None:
            self._producer = Producer({**self._client, "acks": "all", "message.timeout.ms": 60_000})
        producer = self._producer
        for number, message in enumerate(messages, 1):
            headers: list[tuple[str, str | bytes | None]]
            headers = [(name, value.encode()) for name, value in message.headers.items()]
            producer.produce(
                topic, message.body, message.key or None, headers=headers,
                on_delivery=lambda error, _: errors.append(error) if error is not None else None,
            )  # fmt: skip
            producer.poll(0)
            if number % at_once == 0 or number == len(messages):
                assert producer.flush(60) == 0, "not acknowledged"
        assert not errors, errors


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def _make(directory: Path) -> Server:
    return KafkaServer(directory)


def _url(server: Server) -> str:
    """As ``KafkaServer.url``; and who was killed is out of the group sooner, for those that wait for its partitions."""
    return f"kafka://127.0.0.1:{server.port}?partitions=3&session.timeout.ms=6000&heartbeat.interval.ms=1000"


def _foreign(server: Server) -> Foreign:
    return KafkaForeign(server)


KIND = Kind("kafka", _make, _url, _foreign, binding="ce_", shows_repetitions=False, restart_seconds=120.0)
