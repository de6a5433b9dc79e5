"""Alembic's entry: runs the migrations of one package on the connection it is given."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    version_table=context.config.attributes["version_table"],
    version_table_schema="duly",
    transaction_per_migration=True,
)
with context.begin_transaction():
    context.run_migrations()
