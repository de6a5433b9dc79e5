"""A mutant: one place of the code made wrong, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """What is replaced where, which requirement that breaks, and which tests are asked about it."""

    id: str  # the requirement: E3.5
    breaks: str  # what no longer holds, in a few words
    file: str
    old: str  # stands exactly once in the file
    new: str
    tests: tuple[str, ...]  # as pytest takes them: a file, or file::name

    def apply(self, text: str) -> str:
        """The file's text with the fault in it."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.id} ({self.breaks}): its place stands {count} times in {self.file}, not once")
        return text.replace(self.old, self.new)
