"""Where Keycloak cannot be had, that is said; what comes is only believed if it is what was once checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.keycloak import distribution
from tests.keycloak.distribution import ARTIFACT, VERSION, Absent, install, main

BRINGS_ANOTHER = f"""#!/bin/sh
for word in "$@"; do case "$word" in -DoutputDirectory=*)
  echo 'something else' > "${{word#*=}}/keycloak-quarkus-dist-{VERSION}.zip";;
esac; done
"""


def bring(place: Path, **programs: str) -> None:
    """Programs of these names, and what they do."""
    for name, text in programs.items():
        (place / name).write_text(text)
        (place / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty machine."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(distribution, "HOME", tmp_path / "keycloak" / "keycloak")
    return place


def test_without_java_maven_or_the_registry_it_is_absent(tools: Path, tmp_path: Path) -> None:
    home = tmp_path / "keycloak" / "keycloak"
    with pytest.raises(Absent, match="there is no java"):
        install(home)
    bring(tools, java="#!/bin/sh\n")
    with pytest.raises(Absent, match="there is no mvn"):
        install(home)
    bring(tools, mvn="#!/bin/sh\nexit 1\n")
    with pytest.raises(Absent, match=f"Maven does not bring {ARTIFACT}"):
        install(home)


def test_its_absence_is_an_error_unless_it_was_asked_about(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["distribution"])
    with pytest.raises(SystemExit, match="Keycloak cannot be had here: there is no java"):
        main()
    monkeypatch.setattr(sys, "argv", ["distribution", "--absent"])
    main()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("keycloak\n", "Keycloak is left out: there is no java\n")


def test_something_else_is_not_unpacked_and_never_taken_for_an_absence(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(tools, java="#!/bin/sh\n", mvn=BRINGS_ANOTHER)
    monkeypatch.setattr(sys, "argv", ["distribution", "--absent"])
    with pytest.raises(SystemExit, match="is not what it was"):
        main()
    assert list((tmp_path / "keycloak").iterdir()) == []
