"""``python -m tests.brokers.install``: what servers need beside wheels; each broker's own module gets it."""

from __future__ import annotations

import importlib

from tests.brokers.servers import chosen


def main() -> None:
    """Call ``install()`` of each module that has one; it does nothing where everything is there."""
    for name in chosen():
        install = getattr(importlib.import_module(f"tests.brokers.server_{name}"), "install", None)
        if install is not None:
            install()


if __name__ == "__main__":
    main()
