"""The engine's first schema."""

from __future__ import annotations

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_HERE = Path(__file__)


def upgrade() -> None:
    """Create the schema."""
    _execute("up")


def downgrade() -> None:
    """Drop it."""
    _execute("down")


def _execute(direction: str) -> None:
    op.get_bind().exec_driver_sql(_HERE.with_name(f"0001_engine.{direction}.sql").read_text().replace("%", "%%"))
