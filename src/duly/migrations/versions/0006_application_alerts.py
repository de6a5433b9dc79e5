"""Alerts of applications."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Allow a kind for whatever an application wants a person to look at."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Allow only those of the engine."""
    run_sql(__file__, "down")
