"""The README's requests work as they are printed, against a system that ``duly up`` has started."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.cli.commands import ROOT, environment, free_port, running, status, wait_until

SECTION = re.compile(r"### Over HTTP\n(.*?)\n### ", re.DOTALL)
SLEEP = "sleep 3; "
UNTIL_COMPLETED = (
    """for _ in $(seq 100); do ask /payments/$PAYMENT | grep -q COMPLETED && break; sleep 0.3; done; echo; """
)
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)


def commands() -> list[str]:
    """What a reader would type."""
    section = SECTION.search((ROOT / "README.md").read_text())
    assert section is not None
    text = "".join(BLOCK.findall(section[1]))
    return [part.strip() for part in re.split(r"^\$ ", text, flags=re.MULTILINE) if part.strip()]


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl on this machine")
def test_the_requests_of_the_readme_work_as_printed(tmp_path: Path) -> None:
    port = str(free_port())
    env = environment(DULY_APP="apps.wiring:app", DULY_DATA=str(tmp_path / "data"), PORT=port)
    typed = "\n".join(commands()).replace(".venv/bin/duly", f"{sys.executable} -m duly.cli.main")
    script = typed.replace(":8000/", f":{port}/").replace("\ncurl ", "\necho; curl ").replace("\nask ", "\necho; ask ")
    assert SLEEP in script
    script = script.replace(SLEEP, UNTIL_COMPLETED)
    with running("up", env=env, log=tmp_path / "log", fresh=True):
        wait_until(lambda: status(f"http://127.0.0.1:{port}/readyz") == 200, what="/readyz is 200")
        env = {name: value for name, value in env.items() if name != "PORT"}  # a reader has not set it
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.split("\n") if line.strip()]
    made, page, accepted, rule, rejected, paid, balance, reversal, check = said
    assert (made["supplier_id"], made["status"], made["created_by"]) == ("ACME-7", "OPEN", "mona")
    assert [item["id"] for item in page["items"]] == [made["id"]]
    assert (accepted["status"], accepted["toUserId"]) == ("Accepted", "bob")
    assert (rule["status"], rule["warnings"]) == ("ACTIVE", [])
    assert (rejected["state"], rejected["reason"]) == ("REJECTED", "not_approved")
    assert (paid["state"], paid["amount"], paid["attempts"]) == ("COMPLETED", "20.00", 1)
    assert (balance["balance"], balance["available"]) == ("20.00", "20.00")
    assert (reversal["status"], reversal["reason"], reversal["amount"]) == ("POSTED", "booked twice", "5.00")
    assert check["isSound"] is True
