"""A small share of the nightly run, always the same steps: world and model agree on every decision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import structlog

from tests.simulation.__main__ import ON_POSTGRES, PURE, machine, main, silence
from tests.simulation.machine import Disagreement, Machine, Pick, hunt, replay

SEED = 7
STEPS = {
    "retry": 10_000,
    "leases": 10_000,
    "routes": 5_000,
    "cron": 1_000,
    "queue": 1_500,
    "events": 1_500,
    "ticks": 800,
}
MOST_SECONDS = 6.0


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Whoever reads logs afterwards, in the same process, is to find them."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def agrees(name: str, dsn: str = "") -> None:
    silence()
    with machine(name, dsn) as one:
        report = hunt(one, steps=STEPS[name], start=SEED, most_seconds=MOST_SECONDS)
    assert report.failure is None, str(report.failure)
    assert report.steps > 0


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_decisions_agree_with_their_model(name: str) -> None:
    agrees(name)


@pytest.mark.parametrize("name", sorted(ON_POSTGRES))
def test_statements_agree_with_their_model(name: str, dsn: str) -> None:
    agrees(name, dsn)


class _Forgetful(Machine):
    """A counter that loses what is above three."""

    name = "forgetful"

    def begin(self) -> None:
        self.world = self.model = 0

    def check(self) -> None:
        self.agree("the count", self.world, self.model)

    def count(self, _pick: Pick) -> None:
        self.tell("count")
        self.model += 1
        self.world = min(self.world + 1, 3)

    def rest(self, _pick: Pick) -> None:
        self.tell("rest")

    rules: ClassVar[Any] = (count, rest)


def test_a_disagreement_is_found_made_small_and_can_be_played_again() -> None:
    found = hunt(_Forgetful(), steps=1_000, start=SEED).failure
    assert found is not None
    assert found.told == ["count()"] * 4
    assert Disagreement.__name__ in found.error
    again = replay(_Forgetful(), found.numbers)
    assert again is not None
    assert again.told == found.told


def test_the_command_says_how_many_steps_it_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--machine", "retry", "--steps", "1000", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert "seed 1" in out
    assert "steps/s" in out
