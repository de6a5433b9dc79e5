"""Keycloak's server distribution, by Maven, in the virtual environment: ``python -m tests.keycloak.distribution``."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "26.4.0"  # runs on Java 17 and 21
SHA256 = "1b6a11a2726ac8a8dc9c91d5fafe989a75ce4f1622d7f7b45c21d5bc16629c0a"
ARTIFACT = f"org.keycloak:keycloak-quarkus-dist:{VERSION}:zip"
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"
HOME = Path(sys.prefix) / "keycloak" / f"keycloak-{VERSION}"
INSTALL_SECONDS = 900


def install(home: Path = HOME) -> None:
    """Fetch it, check that it is what was once checked, and unpack it; nothing to do when it is there."""
    if (home / "version.txt").exists():
        return
    place = home.parent
    place.mkdir(parents=True, exist_ok=True)
    command = ["mvn", "--batch-mode", "--quiet", COPY, f"-Dartifact={ARTIFACT}", f"-DoutputDirectory={place}"]
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS, cwd=place)
    packed = place / f"keycloak-quarkus-dist-{VERSION}.zip"
    with packed.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        packed.unlink()
        raise SystemExit(f"{packed.name} is not what it was: its SHA-256 is {found}")
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(place / "unpacked")
    shutil.move(place / "unpacked" / home.name, home)
    shutil.rmtree(place / "unpacked")
    packed.unlink()


if __name__ == "__main__":
    install()
