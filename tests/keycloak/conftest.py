"""One Keycloak for the whole run, its people, and an api process that trusts it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.wiring import app
from duly.app import Duly
from tests.keycloak.pages import PEOPLE, Site, serving
from tests.keycloak.server import Keycloak


@pytest.fixture(scope="session")
def duly_app() -> Duly:
    """Every database of these tests has the applications' schemas."""
    return app


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keycloak]:
    """The server with our realm, as the file says, and people in it."""
    server = Keycloak(tmp_path_factory.mktemp("keycloak"))
    try:
        server.start()
        for username, (first, last, password, *roles) in PEOPLE.items():
            server.add_person(username, first, last, *roles, password=password)
        yield server
    finally:
        server.kill()
        server.client.close()


@pytest.fixture
def keycloak(installed: Keycloak) -> Keycloak:
    """It runs, whatever the test before did to it."""
    installed.start()
    return installed


@pytest.fixture
def site(keycloak: Keycloak, dsn: str, tmp_path: Path) -> Iterator[Site]:
    """``duly api`` with all applications and the console."""
    with serving(keycloak, dsn, tmp_path) as served:
        yield served
