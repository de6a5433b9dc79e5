"""Roles of applications in the console."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let a session hold the roles that sections of applications ask for."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Allow only the roles of the engine; who has others signs in again."""
    run_sql(__file__, "down")
