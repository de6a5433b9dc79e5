"""The lists of mutants fit the code: each place stands there once, each test exists, no requirement is left out."""

from __future__ import annotations

import pytest

from tests.mutants.lists import MUTANTS
from tests.mutants.mutant import ROOT, Mutant

COUNTS = {"E1": 8, "E2": 4, "E3": 16, "E4": 5, "E5": 7, "E6": 4, "E7": 3}
PLAIN = {"T": 8, "Q": 4, "B": 7, "C": 4, "F": 14}
ELSEWHERE = {
    "E1.7": "brokers: make test-brokers",
    "E2.4": "brokers: make test-brokers",
    "F14": "budgets: make bench-ledger, bench-payments, bench-decisions, bench-kyc",
}
REQUIREMENTS = {f"{part}.{n}" for part, count in COUNTS.items() for n in range(1, count + 1)} | {
    f"{part}{n}" for part, count in PLAIN.items() for n in range(1, count + 1)
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one.id}-{one.breaks}")
def test_a_mutant_fits_the_code_and_names_tests_that_exist(mutant: Mutant) -> None:
    before = (ROOT / mutant.file).read_text()
    assert mutant.apply(before) != before
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text()
        assert not name or f"def {name.split('[')[0]}(" in text, f"{file} has no {name}"


def test_every_requirement_has_a_mutant() -> None:
    assert {mutant.id for mutant in MUTANTS} == REQUIREMENTS - set(ELSEWHERE)


def test_no_mutant_is_listed_twice() -> None:
    places = [(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS]
    assert len(set(places)) == len(places)
