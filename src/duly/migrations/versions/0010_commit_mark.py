"""What tells afterwards whether a COMMIT took effect."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the function."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Take it away."""
    run_sql(__file__, "down")
