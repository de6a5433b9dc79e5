"""Decisions: rule sets, rules and lists with their versions, observations, the decision log, and its clean-up."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0007_decisions"
down_revision = "0006_ledger"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the schema."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop it."""
    run_sql(__file__, "down")
