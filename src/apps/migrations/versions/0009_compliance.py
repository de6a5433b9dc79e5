"""Compliance: alerts, cases and their timelines; and what the rules on transactions may ask."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0009_compliance"
down_revision = "0008_payments"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the schema."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop it."""
    run_sql(__file__, "down")
