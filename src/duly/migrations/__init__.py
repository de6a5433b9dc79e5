"""The engine's schema, step by step; each step is a pair of SQL files beside its Alembic script."""

from __future__ import annotations

from pathlib import Path

from alembic import op

from duly.failpoints import failpoint


def run_sql(script: str, direction: str) -> None:
    """Run ``NAME.up.sql`` or ``NAME.down.sql`` that lies beside the script ``NAME.py``."""
    path = Path(script)
    failpoint("migrate.before_step")
    op.get_bind().exec_driver_sql(path.with_name(f"{path.stem}.{direction}.sql").read_text().replace("%", "%%"))
    failpoint("migrate.step_done")
