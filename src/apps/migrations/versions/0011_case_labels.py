"""Cases are listed by several filters along one index, on kind, severity and status as one label."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0011_case_labels"
down_revision = "0010_kyc"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the indexes, and drop those that they replace."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """The other way round."""
    run_sql(__file__, "down")
