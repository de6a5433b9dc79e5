"""What the documentation shows is what works."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from duly.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str = "python") -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_tutorial_runs_as_printed(tmp_path: Path) -> None:
    """E3.2: a newcomer's first timer, consumer and test, from the page."""
    shop, test = blocks(ROOT / "docs" / "tutorial.md")
    (tmp_path / "shop.py").write_text(shop)
    (tmp_path / "test_shop.py").write_text(test)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "asyncio_mode=auto",
        "test_shop.py",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_is_python(page: Path) -> None:
    for block in blocks(page):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_first_job_timer_consumer_and_cron_take_under_ten_lines_each() -> None:
    examples = blocks(ROOT / "README.md")[1:5]
    assert len(examples) == 4
    for example in examples:
        assert len([line for line in example.splitlines() if line.strip()]) < 10, example


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    names = {str(field.validation_alias or f"DULY_{name.upper()}") for name, field in Settings.model_fields.items()}
    shortened = {name for name in names if name.startswith("DULY_KEEP_")}
    assert [name for name in sorted(names - shortened) if name not in text] == []
    for name in shortened:
        assert name.removeprefix("DULY_KEEP") in text
