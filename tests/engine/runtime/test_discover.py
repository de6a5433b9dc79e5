"""Which application a process works for, and what it says when there is none by that name."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from duly.app import Duly
from duly.errors import Refused
from duly.runtime.discover import find_app


def test_the_setting_names_an_object_in_a_module() -> None:
    from tests.engine.cli.sample import app

    assert find_app("tests.engine.cli.sample:app") is app


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("shop", "must look like package.module:attribute, not 'shop'"),
        ("shop:", "must look like package.module:attribute"),
        ("shop.py:app()", "must look like package.module:attribute"),
        ("no_such_module:app", "but there is no no_such_module"),
        ("tests.engine.no_such_module:app", "but there is no tests.engine.no_such_module"),
        ("tests.engine.cli.sample:shop", "tests.engine.cli.sample has nothing called shop"),
        ("tests.engine.cli.sample:router", "is a APIRouter, not a duly.Duly"),
    ],
)
def test_a_wrong_value_is_a_kind_sentence(value: str, said: str) -> None:
    with pytest.raises(Refused) as refused:
        find_app(value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_module_that_fails_or_lacks_something_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "lacking_app.py").write_text("import no_such_dependency\n")
    with pytest.raises(Refused, match="lacking_app, which needs no_such_dependency: install it"):
        find_app("lacking_app:app")
    (tmp_path / "failing_app.py").write_text("1 / 0\n")
    with pytest.raises(Refused, match="importing failing_app for DULY_APP failed: ZeroDivisionError"):
        find_app("failing_app:app")


def test_without_a_setting_the_installed_application_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.cli.sample import app

    installed = importlib.metadata.EntryPoint("default", "tests.engine.cli.sample:app", "duly.apps")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [installed])
    assert find_app() is app


def test_without_anything_an_empty_application_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for left_behind in ([], [importlib.metadata.EntryPoint("default", "gone_app:app", "duly.apps")]):
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda found=left_behind, **_: found)
        assert find_app().handlers.keys() == Duly().handlers.keys()
