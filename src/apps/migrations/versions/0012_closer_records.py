"""The journal says who posted, its seals cover it, and evidence that came too late is kept."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0012_closer_records"
down_revision = "0011_case_labels"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns, and functions beside those that the release before this one calls."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Take them away."""
    run_sql(__file__, "down")
