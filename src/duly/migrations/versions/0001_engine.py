"""The engine's first schema."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the schema."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop it."""
    run_sql(__file__, "down")
