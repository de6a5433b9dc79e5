"""Commerce: orders with their payments, carts, links, and the schedules that look after them."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0004_commerce"
down_revision = "0003_birthdays"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the schema."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Drop it."""
    run_sql(__file__, "down")
