"""A console in a process of its own, and a real Chromium that looks at it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from apps.wiring import app
from duly.testing import TestServer
from tests.console.browser import showcase
from tests.engine.cli.commands import environment, free_port, running, status, wait_until

playwright = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
AXE = Path(__file__).parent / "assets" / "axe.min.js"
SIGNED_IN = re.compile(r"/console(/rules|/cases)?$")  # who has one section only lands there
# What stands in more than one line although it fits into one. A line may end after a space, a hyphen or a slash, and
# a long name's after its parts; what is longer than any column may be broken.
BROKEN_WORDS = """() => {
  const found = [];
  for (const cell of document.querySelectorAll("main .scroll th, main .scroll td")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      if (!texts.currentNode.parentElement.checkVisibility()) continue;
      for (const word of texts.currentNode.data.matchAll(/[^\\s\\/:._?&=–-]{2,20}(?=[\\s\\/:._?&=–-]|$)/g)) {
        const range = document.createRange();
        range.setStart(texts.currentNode, word.index);
        range.setEnd(texts.currentNode, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (lines.size > 1) found.push(word[0]);
      }
    }
  }
  return found;
}"""
CUT_TABLES = """() => [...document.querySelectorAll("main .scroll")]
  .filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.getAttribute("aria-labelledby"))"""
LOOSE_TABLES = """() => [...document.querySelectorAll("main table:not(.u-legend)")]
  .filter((table) => !table.closest(".scroll")).map((table) => table.innerText.slice(0, 40))"""
ROOM_FOR_TABLES = 1280
SHOTS = os.environ.get("DULY_DAYS")
"""Where to leave a picture of every page that a test looks at, for somebody to look at."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these need a browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


@dataclass
class Tab:
    """A page of the browser, and everything it complained about."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)

    def go(self, path: str) -> Any:
        """Open a page of the console."""
        return self.page.goto(self.url + path, wait_until="load")

    def sign_in(self, person: str) -> None:
        """As a person does: choose who to be."""
        self.go("/console")
        self.page.click(f'button[value="{person}"]')
        self.page.wait_for_url(SIGNED_IN)

    def refuse(self, dialog: Any) -> None:
        """A dialog means that a script ran which is not ours."""
        self.complaints.append(f"a script ran: {dialog.message}")
        dialog.dismiss()

    def keep_picture(self, name: str) -> None:
        """The whole page, if somebody wants to see it."""
        if SHOTS:
            self.page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)

    def misfits(self) -> list[str]:
        """What of this page does not fit: the page itself, words in tables, and tables where there is room for them."""
        page = self.page
        wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        found = [f"the page is {wide} px too wide"] if wide > 0 else []
        found += [f"broken word: {word}" for word in page.evaluate(BROKEN_WORDS)]
        found += [f"table without a box: {text}" for text in page.evaluate(LOOSE_TABLES)]
        if page.viewport_size["width"] >= ROOM_FOR_TABLES:
            found += [f"cut table: {name}" for name in page.evaluate(CUT_TABLES)]
        return found

    def axe(self) -> list[str]:
        """What axe finds, by rule and place. It is evaluated by the debugger, which no policy of the page stops."""
        self.page.evaluate(AXE.read_text() + "; undefined")
        options = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
        found = self.page.evaluate("(options) => axe.run(document, options)", options)
        return [f"{one['id']}: {node['target']}" for one in found["violations"] for node in one["nodes"]]


@dataclass(frozen=True)
class World:
    """Where it is served, and the database beneath."""

    url: str
    dsn: str


@pytest.fixture(scope="session")
def served(server: TestServer) -> Iterator[World]:
    """``duly api`` with the applications, on a filled database."""
    with server.database(app) as dsn, tempfile.TemporaryDirectory() as directory:
        asyncio.run(showcase.load_samples(dsn, Path(directory)))
        showcase.fill(dsn)
        url = f"http://127.0.0.1:{(port := free_port())}"
        env = environment(
            DATABASE_URL=dsn, DULY_DATA=directory, PORT=str(port), DULY_ALLOW_UNSAFE_DATABASE="1",
            DULY_APP="apps.wiring:app",
        )  # fmt: skip
        with running("api", env=env, log=Path(directory) / "log", fresh=True):
            wait_until(lambda: status(f"{url}/readyz") == 200, what="/readyz is 200")
            yield World(url, dsn)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """One browser for all tests."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no Chromium: make test-browser installs it")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_tab(served: World, chromium: Any) -> Iterator[Callable[..., Tab]]:
    """Opens a tab in a profile of its own; what the page says to the console, or violates, is kept."""
    contexts = []

    def make(person: str | None = None, *, width: int = 1280, height: int = 900, **options: Any) -> Tab:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(10_000)
        contexts.append(context)
        tab = Tab(context.new_page(), served.url)
        tab.page.on(
            "console", lambda said: tab.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.page.on("dialog", tab.refuse)
        if person is not None:
            tab.sign_in(person)
        return tab

    yield make
    for context in contexts:
        context.close()
