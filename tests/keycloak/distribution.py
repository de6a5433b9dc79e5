"""Keycloak's server distribution, by Maven, in the virtual environment: ``python -m tests.keycloak.distribution``.

With ``--absent``, that it cannot be had here is no error: its name is printed, and why on stderr.
"""

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


class Absent(Exception):
    """There is no way to have it on this machine; the message says what is missing."""


def main() -> None:
    """Get it, or say that it cannot be had."""
    try:
        install(HOME)
    except Absent as error:
        if "--absent" not in sys.argv[1:]:
            raise SystemExit(f"Keycloak cannot be had here: {error}") from None
        print(f"Keycloak is left out: {error}", file=sys.stderr)
        print("keycloak")


def install(home: Path) -> None:
    """Fetch it, check that it is what was once checked, and unpack it; nothing to do when it is there."""
    if shutil.which("java") is None:
        raise Absent("there is no java")
    if (home / "version.txt").exists():
        return
    if shutil.which("mvn") is None:
        raise Absent("there is no mvn")
    packed = _fetch(home.parent)
    with packed.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        packed.unlink()
        raise SystemExit(f"{packed.name} is not what it was: its SHA-256 is {found}")
    unpacked = home.parent / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)  # what was cut short is not taken for whole
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(unpacked)
    shutil.move(unpacked / home.name, home)
    unpacked.rmdir()
    packed.unlink()


def _fetch(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    command = ["mvn", "--batch-mode", "--quiet", COPY, f"-Dartifact={ARTIFACT}", f"-DoutputDirectory={place}"]
    try:
        subprocess.run(command, check=True, timeout=INSTALL_SECONDS, cwd=place, stdout=sys.stderr)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Absent(f"Maven does not bring {ARTIFACT} ({type(error).__name__})") from None
    return place / f"keycloak-quarkus-dist-{VERSION}.zip"


if __name__ == "__main__":
    main()
