"""${message}"""

from __future__ import annotations

from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    """Expand."""
    ${upgrades if upgrades else "op.execute('SELECT 1')"}


def downgrade() -> None:
    """Take it back."""
    ${downgrades if downgrades else "op.execute('SELECT 1')"}
