"""The Dockerfile, read: nothing builds it here."""

from __future__ import annotations

import json
import re

from tests.deploy.manifests import ROOT, WORKLOADS, project

TEXT = (ROOT / "deploy" / "Dockerfile").read_text()
SECRET = re.compile(r"password|passwd|secret|token|credential|database_url|://\S+@", re.IGNORECASE)


def instructions() -> list[tuple[str, str]]:
    """(FROM, "python:3.12-slim AS build"), ...; continued lines joined, comments left out."""
    lines = [line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined.splitlines()]


def values(name: str) -> list[str]:
    """What follows each instruction of that name."""
    return [value for instruction, value in instructions() if instruction == name]


def test_every_path_that_is_copied_exists() -> None:
    copied = [value.split() for value in values("COPY") if not value.startswith("--from=")]
    sources = [source for words in copied for source in words[:-1]]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert "." not in sources, "the whole context would bring .git and .duly along"


def test_what_the_package_is_built_from_is_copied() -> None:
    copied = {source for value in values("COPY") for source in value.split()[:-1]}
    assert {"pyproject.toml", project()["readme"], "src", "requirements.lock"} <= copied


def test_two_stages_share_one_small_base() -> None:
    assert values("FROM") == ["python:3.12-slim AS build", "python:3.12-slim"]
    built = [value.split()[0] for value in values("COPY")[-1:]]
    assert built == ["--from=build"], "the last stage takes nothing from the context"


def test_every_package_is_checked_against_its_hash() -> None:
    fetching = [part for value in values("RUN") for part in value.split("&&") if re.search(r"\bpip\b", part)]
    assert len(fetching) == 4
    for part in fetching:
        if "venv" not in part.split():
            assert "--require-hashes" in part or "--no-index" in part, part
    assert "--requirement requirements.lock" in values("RUN")[0]


def test_it_runs_as_a_user_without_rights_the_one_of_the_manifests() -> None:
    users = values("USER")
    last = max(index for index, (name, _) in enumerate(instructions()) if name == "FROM")
    assert [value for name, value in instructions()[last:] if name == "USER"] == users
    uid, gid = users[-1].split(":")
    assert uid.isdigit()
    assert int(uid) > 0
    for work in WORKLOADS:
        context = work.spec["securityContext"]
        assert (str(context["runAsUser"]), str(context["runAsGroup"])) == (uid, gid), work.name
    after = instructions()[instructions().index(("USER", users[-1])) :]
    assert not [name for name, _ in after if name in {"RUN", "COPY", "ADD"}]


def test_it_holds_no_secret() -> None:
    assert SECRET.search(TEXT) is None
    assert not values("ARG")
    assert not values("ADD")


def test_its_command_is_one_of_ours() -> None:
    (command,) = values("CMD")
    assert json.loads(command)[0] in project()["scripts"]
    assert not values("ENTRYPOINT"), "manifests name the command themselves"


def test_the_example_of_building_it_names_this_release() -> None:
    assert f"-t duly:{project()['version']} ." in TEXT
