"""What is vendored is what its makers published, and is listed with its licence."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import duly.console

STATIC = Path(duly.console.__file__).parent / "static"
TEMPLATES = Path(duly.console.__file__).parent / "templates"
OURS = {"console.css", "console.js", "duly.svg", "manifest.json"}


def test_every_vendored_file_is_in_the_manifest_with_its_hash_and_licence() -> None:
    manifest = json.loads((STATIC / "manifest.json").read_text())
    assert {one["file"] for one in manifest} == {path.name for path in STATIC.iterdir()} - OURS
    for one in manifest:
        assert set(one) == {"file", "name", "version", "path", "licence", "sha256"}
        assert hashlib.sha256((STATIC / one["file"]).read_bytes()).hexdigest() == one["sha256"], one["file"]
        assert one["licence"] in ("0BSD", "MIT")


def test_no_template_has_an_inline_script_style_or_handler() -> None:
    for path in TEMPLATES.iterdir():
        page = path.read_text()
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", page), path.name
        assert "|safe" not in page, path.name


def test_our_own_files_are_small() -> None:
    assert (STATIC / "console.js").stat().st_size < 10_000
    assert (STATIC / "console.css").stat().st_size < 30_000
