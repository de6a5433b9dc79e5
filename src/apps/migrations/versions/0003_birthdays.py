"""Users and birthdays: people, their copies, one message a year, and the schedules that deliver it."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0003_birthdays"
down_revision = "0002_transfers"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the schema."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop it."""
    run_sql(__file__, "down")
