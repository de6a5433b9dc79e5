"""Which events of an aggregate were given up."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index by which they are found."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Take it away."""
    run_sql(__file__, "down")
