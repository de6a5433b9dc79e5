"""Identity checks: sessions, their history, callbacks that fit none of them; and two indexes for dossiers."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0010_kyc"
down_revision = "0009_compliance"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the schema and the indexes."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop them."""
    run_sql(__file__, "down")
