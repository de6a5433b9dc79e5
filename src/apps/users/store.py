"""The table of users, and every statement on it."""

from __future__ import annotations

from datetime import date, datetime
from uuid import UUID

from sqlalchemy import CheckConstraint, Column, Date, DateTime, Integer, MetaData, Table, Text, Uuid, select, text

from apps.users.model import User
from duly import Tx

metadata = MetaData(schema="users")

users = Table(
    "users",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("first_name", Text, nullable=False),
    Column("last_name", Text, nullable=False),
    Column("date_of_birth", Date, nullable=False),
    Column("timezone", Text, nullable=False),
    Column("version", Integer, nullable=False, server_default=text("1")),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    CheckConstraint(
        "length(first_name) BETWEEN 1 AND 200 AND length(last_name) BETWEEN 1 AND 200", name="users_are_named"
    ),
    CheckConstraint("date_of_birth >= '1900-01-01'", name="users_birth_is_plausible"),
    CheckConstraint("length(timezone) BETWEEN 1 AND 50", name="users_zone_is_named"),
    CheckConstraint("version >= 1", name="users_version_counts_up"),
)

INSERT_USER = text("""
INSERT INTO users.users (id, first_name, last_name, date_of_birth, timezone, created_at, updated_at)
VALUES (:id, :first_name, :last_name, :date_of_birth, :timezone, duly.now(), duly.now())
RETURNING *
""")
LOCK_USER = text("SELECT *, duly.now() AS now FROM users.users WHERE id = :id FOR NO KEY UPDATE")
UPDATE_USER = text("""
UPDATE users.users
SET first_name = :first_name, last_name = :last_name, date_of_birth = :date_of_birth, timezone = :timezone,
    version = version + 1, updated_at = duly.now()
WHERE id = :id AND version = :version
RETURNING *
""")
DELETE_USER = text("DELETE FROM users.users WHERE id = :id RETURNING id")


async def insert_user(
    tx: Tx, *, user_id: UUID, first_name: str, last_name: str, date_of_birth: date, timezone: str
) -> User:
    """Write a new one."""
    values = {"id": user_id, "first_name": first_name, "last_name": last_name}
    made = await tx.execute(INSERT_USER, {**values, "date_of_birth": date_of_birth, "timezone": timezone})
    return User(**made.mappings().one())


async def find_user(tx: Tx, user_id: UUID) -> User | None:
    """One by its id."""
    row = (await tx.execute(select(users).where(users.c.id == user_id))).mappings().one_or_none()
    return User(**row) if row else None


async def lock_user(tx: Tx, user_id: UUID) -> tuple[User, datetime] | None:
    """Be alone with it until the transaction ends; and what time it is."""
    row = (await tx.execute(LOCK_USER, {"id": user_id})).mappings().one_or_none()
    if row is None:
        return None
    values = dict(row)
    now: datetime = values.pop("now")
    return User(**values), now


async def update_user(tx: Tx, changed: User) -> User:
    """Write what a locked one has become."""
    values = {"id": changed.id, "first_name": changed.first_name, "last_name": changed.last_name}
    values |= {"date_of_birth": changed.date_of_birth, "timezone": changed.timezone, "version": changed.version}
    return User(**(await tx.execute(UPDATE_USER, values)).mappings().one())


async def delete_user(tx: Tx, user_id: UUID) -> bool:
    """Whether there was one."""
    return (await tx.execute(DELETE_USER, {"id": user_id})).one_or_none() is not None
