"""E5.7: the HTTP face of a process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from fastapi import APIRouter

from duly.app import Duly
from duly.db import Database
from duly.http.api import create_api, prefers_html
from duly.settings import Settings
from tests.engine.cli.sample import app
from tests.engine.http.serving import served

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.fixture
async def client(db: Database) -> AsyncIterator[httpx2.AsyncClient]:
    async with served(create_api(db, [], Settings(), app)) as made:
        yield made


async def test_the_routes_of_the_application_are_served_and_documented(client: httpx2.AsyncClient) -> None:
    """E5.7."""
    assert (await client.get("/sample")).json() == {"hello": "world"}
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"/sample", "/healthz", "/readyz", "/metrics"} <= paths.keys()
    assert (await client.get("/docs")).status_code == 200


async def test_the_front_page_is_json_for_programs_and_html_for_people(client: httpx2.AsyncClient) -> None:
    program = await client.get("/")
    assert program.json()["links"]["docs"] == "/docs"
    person = await client.get("/", headers={"Accept": BROWSER})
    assert person.headers["content-type"].startswith("text/html")
    assert '<a href="/docs">' in person.text
    assert "default-src 'none'" in person.headers["content-security-policy"]
    assert "style=" not in person.text
    assert "<script" not in person.text
    assert (await client.get("/front.css")).headers["content-type"].startswith("text/css")
    assert program.headers["vary"] == person.headers["vary"] == "Accept"


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER, True),
        ("*/*", False),
        ("", False),
        ("application/json", False),
        ("application/json, text/html;q=0.5", False),
        ("application/json;q=0.2, text/html;q=0.5", True),
        ("text/html;q=0", False),
        ("text/html;q=nonsense", False),
    ],
)
def test_what_a_client_accepts_decides(accept: str, html: bool) -> None:
    assert prefers_html(accept) is html


@pytest.mark.parametrize(("env", "status"), [("development", 200), ("production", 404)])
async def test_routes_of_a_sandbox_are_served_in_development_only(db: Database, env: Any, status: int) -> None:
    """E5.7."""
    shop, router = Duly(), APIRouter()
    router.add_api_route("/toys", lambda: {"toys": 1})
    shop.include_router(router, development_only=True)
    async with served(create_api(db, [], Settings(env=env), shop)) as made:
        assert (await made.get("/toys")).status_code == status
