"""The peers' figures alone, on a durable PostgreSQL of their own: ``python -m benchmarks.peers --only pgqueuer``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.peers import FIGURES, PEERS, Failed, Peer, Unavailable, measure, prepare
from duly.runtime.embedded import EmbeddedPostgres

TIMEOUT_SECONDS = 300
FEWER_JOBS = {"enqueue_one": 2_000, "latency": 200}


def main() -> int:
    """Prepare and measure each peer, and print one line for it."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        server = EmbeddedPostgres.at(Path(directory))
        server.start()
        try:
            for name in options.only or PEERS:
                try:
                    peer = prepare(name, options.cache)
                except Unavailable as missing:
                    print(f"{name:16} unavailable: {missing}", flush=True)
                    continue
                print_peer(
                    peer, {figure: figures(server, name, figure, options) for figure in options.figure or FIGURES}
                )
        finally:
            server.stop()
    return 0


def arguments() -> argparse.Namespace:
    """What to measure, and with which settings instead of the tuned ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--only", action="append", choices=PEERS, metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--figure", action="append", choices=FIGURES, metavar="FIGURE", help=", ".join(FIGURES))
    parser.add_argument("--size", type=int, default=20_000, help="jobs in each figure (default 20000)")
    parser.add_argument("--cache", type=Path, default=Path(".venv/peers"), help="where the environments are made")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the driver's")
    return parser.parse_args()


def figures(server: EmbeddedPostgres, name: str, figure: str, options: argparse.Namespace) -> list[float] | str:
    """One figure on a fresh database, or why there is none."""
    size = min(options.size, FEWER_JOBS.get(figure, options.size))
    settings = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in options.set)}
    with database(server) as dsn:
        try:
            return measure(
                name,
                figure,
                dsn=dsn,
                cache=options.cache,
                size=size,
                timeout_seconds=TIMEOUT_SECONDS,
                settings=settings,
            )
        except Failed as failed:
            return str(failed)


@contextmanager
def database(server: EmbeddedPostgres) -> Iterator[str]:
    """An empty database, dropped afterwards."""
    name = sql.Identifier("peer")
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as admin:
        admin.execute(sql.SQL("CREATE DATABASE {}").format(name))
        try:
            yield server.dsn("peer")
        finally:
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def print_peer(peer: Peer, measured: dict[str, Any]) -> None:
    """A heading, then a line for each figure."""
    print(f"{peer.name} {peer.version} ({peer.language}): {peer.configuration}")
    for figure, values in measured.items():
        if isinstance(values, str) or not values:
            shown = values or "it has no bulk call"
        elif figure == "latency":
            values.sort()
            p50, p95, p99 = (values[int(len(values) * share)] for share in (0.50, 0.95, 0.99))
            shown = f"p50 {p50:.2f} ms, p95 {p95:.2f} ms, p99 {p99:.2f} ms"
        else:
            shown = f"{values[0]:,.0f} jobs/s"
        print(f"  {figure:14} {shown}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
