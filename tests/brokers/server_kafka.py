"""A real Apache Kafka for the tests: one broker that is its own controller, from Maven's jars on the machine's Java."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

POM = Path(__file__).parent / "kafka" / "pom.xml"
JARS = Path(sys.prefix) / "kafka"
START_SECONDS = 300.0  # on a machine that has other things to do; alone it takes five
STOP_SECONDS = 30.0
JAVA = ["java", "-Xms128m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
controller.listener.names=CONTROLLER
listeners=BROKER://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=BROKER://127.0.0.1:{port}
inter.broker.listener.name=BROKER
listener.security.protocol.map=BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT
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
log.cleaner.dedupe.buffer.size=2097152
log.index.size.max.bytes=65536
"""


class KafkaServer:
    """One server in its own directory; its port stays the same over restarts, and its data too."""

    name = "kafka"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port, controller_port = _free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self._settings = directory / "server.properties"
        self._settings.write_text(SETTINGS.format(port=self.port, controller_port=controller_port, directory=directory))

    @property
    def url(self) -> str:
        """Its address, as duly takes it; few partitions, for the tests have few aggregates."""
        return f"kafka://127.0.0.1:{self.port}?partitions=3"

    @staticmethod
    def install() -> None:
        """Bring the jars, once for each virtual environment."""
        if list(JARS.glob("kafka_2.13-*.jar")):
            return
        for tool, package in (("java", "openjdk-17-jre-headless"), ("mvn", "maven")):
            if shutil.which(tool) is None:
                raise RuntimeError(f"Kafka needs {tool}: apt-get install {package}, or leave it out: LEAVE_OUT=kafka")
        # To a directory beside it first: what was cut short is not taken for whole.
        parts = JARS.with_name("kafka.part")
        command = ["mvn", "-q", "-B", "-ntp", "-f", str(POM), "dependency:copy-dependencies"]
        command += ["-DincludeScope=runtime", f"-DoutputDirectory={parts}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if ended.returncode != 0:
            last = (ended.stdout + ended.stderr).strip().splitlines()[-5:]
            raise RuntimeError("Maven could not bring Kafka (LEAVE_OUT=kafka goes without): " + " ".join(last))
        shutil.rmtree(JARS, ignore_errors=True)
        parts.rename(JARS)

    def start(self) -> None:
        """Start it and wait until it answers; on first start its storage is formatted."""
        self.install()
        if not (self.directory / "logs").exists():
            self._run("kafka.tools.StorageTool", "format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", str(self._settings))
        with (self.directory / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                ["nice", "-n", "10", *JAVA, "-cp", f"{JARS}/*", "kafka.Kafka", str(self._settings)],
                stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=self.directory, start_new_session=True,
            )  # fmt: skip
        self._wait_until_ready()

    def stop(self) -> None:
        """Stop it in good order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """It is there, and does nothing."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, signal.SIGCONT)
        os.killpg(process.pid, how)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_SECONDS)

    def _run(self, *arguments: str) -> None:
        command = [*JAVA, "-cp", f"{JARS}/*", *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, cwd=self.directory)
        if ended.returncode != 0:
            raise RuntimeError(f"{arguments[0]} failed: {(ended.stdout + ended.stderr)[-1000:]}")

    def _wait_until_ready(self) -> None:
        """A listener is not enough: it has to answer, and to be its own controller."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        assert self._process is not None
        until = time.monotonic() + START_SECONDS
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{self.port}", "log_level": 0})
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            try:
                if admin.describe_cluster(request_timeout=2).result(3).nodes:
                    return
            except (KafkaException, TimeoutError):
                time.sleep(0.1)
        self.kill()
        raise RuntimeError("Kafka does not start:\n" + (self.directory / "server.log").read_text()[-2000:])


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
