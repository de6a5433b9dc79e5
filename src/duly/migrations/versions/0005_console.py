"""The console's sessions."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table and the schedule of its clean-up."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop both."""
    run_sql(__file__, "down")
