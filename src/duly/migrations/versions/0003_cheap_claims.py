"""Claims that stay cheap: checks when a value is made, and plans that fit the queue when it is full."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Turn three constraints into those of domains, and keep the queues' pages."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Turn it back."""
    run_sql(__file__, "down")
