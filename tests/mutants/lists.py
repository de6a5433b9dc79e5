"""All mutants, by area."""

from __future__ import annotations

from tests.mutants.compliance import COMPLIANCE
from tests.mutants.console import CONSOLE
from tests.mutants.events import EVENTS
from tests.mutants.jobs import JOBS
from tests.mutants.money import MONEY
from tests.mutants.mutant import Mutant
from tests.mutants.requests import REQUESTS
from tests.mutants.time import TIME
from tests.mutants.webhooks import WEBHOOKS

MUTANTS: list[Mutant] = [*EVENTS, *JOBS, *WEBHOOKS, *CONSOLE, *REQUESTS, *TIME, *MONEY, *COMPLIANCE]
