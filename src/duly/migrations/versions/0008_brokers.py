"""What brokers bring: the events received, how far was read, and which consumer gets its events from where."""

from __future__ import annotations

from duly.migrations import run_sql

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables of the receiver, and the column that says where a consumer's events come from."""
    run_sql(__file__, "up")


def downgrade() -> None:
    """Take them away; every consumer gets its events from the relay again, and what waits keeps its event."""
    run_sql(__file__, "down")
