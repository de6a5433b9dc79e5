"""The ledger: accounts, balances, the journal, holds and seals, with the functions that alone write them."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0006_ledger"
down_revision = "0005_currencies"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the schema."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop it."""
    run_sql(__file__, "down")
