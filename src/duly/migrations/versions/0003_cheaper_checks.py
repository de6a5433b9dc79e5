"""Names and payloads of jobs are checked when they are made, not at every claim."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Turn three constraints of the queue into those of two domains."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Turn them back."""
    run_sql(__file__, "down")
