"""``python -m tests.brokers.install``: what servers need beside wheels; each broker's own module gets it.

With ``--absent``, what cannot be had here is no error: the names of those brokers are printed, for LEAVE_OUT, and why
on stderr.
"""

from __future__ import annotations

import importlib
import sys

from tests.brokers.servers import Absent, chosen


def main() -> None:
    """Get what is missing; where everything is there, nothing happens."""
    absent = []
    for name in chosen():
        try:
            install(name)
        except Absent as error:
            if "--absent" not in sys.argv[1:]:
                raise SystemExit(str(error)) from None
            print(f"{name} is left out. {error}", file=sys.stderr)
            absent.append(name)
    if absent:
        print(",".join(absent))


def install(name: str) -> None:
    """Call ``install()`` of this broker's module, if it has one."""
    found = getattr(importlib.import_module(f"tests.brokers.server_{name}"), "install", None)
    if found is not None:
        found()


if __name__ == "__main__":
    main()
