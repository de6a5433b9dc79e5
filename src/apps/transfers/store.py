"""The tables of transfers, and every statement on them.

Locks are taken in one order: product rows by id, then transfers by (created_at, id), then service requests. Whoever
holds a product's lock is alone with its transfers and requests, so the later locks never wait for one of us.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Index,
    MetaData,
    Table,
    Text,
    Uuid,
    select,
    text,
)

from apps.transfers.model import (
    Notice,
    NoticeKind,
    Product,
    ProductDetails,
    RequestMove,
    RequestStatus,
    ServiceRequest,
    Transfer,
    TransferStatus,
)
from duly import Tx

metadata = MetaData(schema="transfers")

products = Table(
    "products",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("name", Text, nullable=False),
    Column("owner_id", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    CheckConstraint("length(name) BETWEEN 1 AND 200", name="products_name_is_short"),
    CheckConstraint("length(owner_id) BETWEEN 1 AND 255", name="products_owner_is_named"),
)

transfers = Table(
    "transfers",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("product_id", Uuid, nullable=False),
    Column("from_user_id", Text, nullable=False),
    Column("to_user_id", Text, nullable=False),
    Column("status", Text, nullable=False, server_default=text("'Pending'")),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    ForeignKeyConstraint(["product_id"], ["transfers.products.id"], name="transfers_product_exists"),
    CheckConstraint(
        "status IN ('Pending', 'Accepted', 'Rejected', 'Cancelled', 'Expired')", name="transfers_status_is_known"
    ),
    CheckConstraint("from_user_id <> to_user_id", name="transfers_users_are_two"),
    CheckConstraint(
        "length(from_user_id) BETWEEN 1 AND 255 AND length(to_user_id) BETWEEN 1 AND 255",
        name="transfers_users_are_named",
    ),
    CheckConstraint("status <> 'Pending' OR updated_at = created_at", name="transfers_pending_is_unchanged"),
    CheckConstraint(
        "status = 'Pending' OR (status = 'Expired') = (updated_at > created_at + interval '72 hours')",
        name="transfers_window_is_kept",
    ),
)
Index("transfers_one_pending", transfers.c.product_id, unique=True, postgresql_where=text("status = 'Pending'"))
Index("transfers_due", transfers.c.status, transfers.c.created_at, transfers.c.id)
Index("transfers_product", transfers.c.product_id, transfers.c.created_at, transfers.c.id)

service_requests = Table(
    "service_requests",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("product_id", Uuid, nullable=False),
    Column("requested_by", Text, nullable=False),
    Column("description", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    ForeignKeyConstraint(["product_id"], ["transfers.products.id"], name="service_requests_product_exists"),
    CheckConstraint("status IN ('InProgress', 'Paused', 'Cancelled')", name="service_requests_status_is_known"),
    CheckConstraint("length(requested_by) BETWEEN 1 AND 255", name="service_requests_asker_is_named"),
    CheckConstraint("length(description) BETWEEN 1 AND 4000", name="service_requests_description_is_short"),
)
Index("service_requests_status", service_requests.c.product_id, service_requests.c.status)
Index(
    "service_requests_newest",
    service_requests.c.product_id,
    service_requests.c.created_at,
    service_requests.c.id,
)

notices = Table(
    "notices",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("event_id", Uuid, nullable=False),
    Column("user_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("transfer_id", Uuid, nullable=False),
    Column("product_id", Uuid, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    CheckConstraint("kind IN ('TransferExpired')", name="notices_kind_is_known"),
    CheckConstraint("length(user_id) BETWEEN 1 AND 255", name="notices_user_is_named"),
)
Index("notices_event", notices.c.event_id, unique=True)
Index("notices_user", notices.c.user_id, notices.c.id)

INSERT_PRODUCT = text("""
INSERT INTO transfers.products (id, name, owner_id, created_at) VALUES (:id, :name, :owner_id, duly.now())
RETURNING *
""")
LOCK_PRODUCT = text("SELECT * FROM transfers.products WHERE id = :id FOR NO KEY UPDATE")
# The transfer is looked at without a lock, only to learn its product, which never changes.
LOCK_PRODUCT_OF_TRANSFER = text("""
SELECT * FROM transfers.products
WHERE id = (SELECT product_id FROM transfers.transfers WHERE id = :transfer_id)
FOR NO KEY UPDATE
""")
CHANGE_OWNER = text("UPDATE transfers.products SET owner_id = :owner_id WHERE id = :id")
# One statement is one moment: a product is never shown with the requests of another.
FIND_PRODUCT_DETAILS = text("""
SELECT p.id, p.name, p.owner_id, p.created_at, t.id AS pending_transfer_id, t.to_user_id AS pending_for,
       r.id AS request_id, r.requested_by, r.description, r.status, r.created_at AS requested_at, r.updated_at
FROM transfers.products p
LEFT JOIN transfers.transfers t ON t.product_id = p.id AND t.status = 'Pending'
LEFT JOIN LATERAL (SELECT * FROM transfers.service_requests s WHERE s.product_id = p.id
                   ORDER BY s.created_at DESC, s.id DESC LIMIT :limit) AS r ON true
WHERE p.id = :id
ORDER BY r.created_at DESC, r.id DESC
""")
# Nothing comes back when one is pending, or is just being started by somebody who does not know our locks.
INSERT_TRANSFER = text("""
INSERT INTO transfers.transfers (id, product_id, from_user_id, to_user_id, created_at, updated_at)
VALUES (:id, :product_id, :from_user_id, :to_user_id, duly.now(), duly.now())
ON CONFLICT (product_id) WHERE status = 'Pending' DO NOTHING
RETURNING *
""")
LOCK_TRANSFER = text("""
SELECT *, duly.now() AS now FROM transfers.transfers WHERE id = :id FOR NO KEY UPDATE
""")
LOCK_PENDING_TRANSFER = text("""
SELECT *, duly.now() AS now FROM transfers.transfers WHERE product_id = :product_id AND status = 'Pending'
FOR NO KEY UPDATE
""")
END_TRANSFER = text("""
UPDATE transfers.transfers SET status = :status, updated_at = :updated_at WHERE id = :id AND status = 'Pending'
RETURNING id
""")
# The oldest first, along transfers_due; an array, so that products are looked up by their key however many there are.
LOCK_PRODUCTS_OF_DUE_TRANSFERS = text("""
SELECT p.id FROM transfers.products p
WHERE p.id = ANY(ARRAY(SELECT t.product_id FROM transfers.transfers t
                       WHERE t.status = 'Pending' AND t.created_at < duly.now() - interval '72 hours'
                       ORDER BY t.created_at, t.id LIMIT :limit))
ORDER BY p.id FOR NO KEY UPDATE
""")
# A statement of its own: its snapshot is younger than the locks, so what ended while we waited is not touched.
EXPIRE_DUE_TRANSFERS = text("""
WITH due AS MATERIALIZED (
    SELECT t.id FROM transfers.transfers t
    WHERE t.product_id = ANY(CAST(:product_ids AS uuid[])) AND t.status = 'Pending'
      AND t.created_at < duly.now() - interval '72 hours'
    ORDER BY t.created_at, t.id FOR NO KEY UPDATE
)
UPDATE transfers.transfers AS t SET status = 'Expired', updated_at = duly.now()
FROM due WHERE t.id = due.id
RETURNING t.*
""")
INSERT_REQUEST = text("""
INSERT INTO transfers.service_requests (id, product_id, requested_by, description, status, created_at, updated_at)
SELECT :id, :product_id, :requested_by, :description, :status, duly.now(), duly.now()
WHERE (SELECT count(*) FROM transfers.service_requests
       WHERE product_id = :product_id AND status IN ('InProgress', 'Paused')) < :most
RETURNING *
""")
MOVE_REQUESTS = text("""
UPDATE transfers.service_requests SET status = :becomes, updated_at = duly.now()
WHERE product_id = ANY(CAST(:product_ids AS uuid[])) AND status = ANY(CAST(:was AS text[]))
""")
FIND_REQUEST = text("""
SELECT r.*, p.owner_id
FROM transfers.service_requests r JOIN transfers.products p ON p.id = r.product_id
WHERE r.id = :id
""")
# By status along transfers_due, by product along transfers_product: each scan ends with its page.
LIST_TRANSFERS = text("""
SELECT t.*, p.name AS product_name FROM (
    SELECT n.* FROM unnest(CAST(:statuses AS text[])) AS s(status)
    CROSS JOIN LATERAL (SELECT o.* FROM transfers.transfers o
                        WHERE o.status = s.status
                          AND (o.created_at, o.id) < (CAST(:before_at AS timestamptz), CAST(:before_id AS uuid))
                        ORDER BY o.created_at DESC, o.id DESC LIMIT :limit) AS n
    ORDER BY n.created_at DESC, n.id DESC LIMIT :limit) AS t
JOIN transfers.products p ON p.id = t.product_id
ORDER BY t.created_at DESC, t.id DESC
""")
LIST_TRANSFERS_OF_PRODUCT = text("""
SELECT t.*, p.name AS product_name
FROM transfers.transfers t JOIN transfers.products p ON p.id = t.product_id
WHERE t.product_id = :product_id
  AND (t.created_at, t.id) < (CAST(:before_at AS timestamptz), CAST(:before_id AS uuid))
  AND t.status = ANY(CAST(:statuses AS text[]))
ORDER BY t.created_at DESC, t.id DESC LIMIT :limit
""")
COUNT_TRANSFERS = text("""
SELECT s.status, (SELECT count(*) FROM (
    SELECT 1 FROM transfers.transfers t WHERE t.status = s.status LIMIT :cap) AS counted) AS number
FROM unnest(CAST(:statuses AS text[])) AS s(status)
""")
FORGET_NOTICES = text("""
WITH gone AS (
    DELETE FROM transfers.notices WHERE id = ANY(ARRAY(
        SELECT id FROM transfers.notices WHERE id < duly.uuid7_floor(duly.now() - make_interval(days => :days))
        ORDER BY id LIMIT :limit))
    RETURNING 1
)
SELECT count(*) FROM gone
""")
INSERT_NOTICE = text("""
INSERT INTO transfers.notices (id, event_id, user_id, kind, transfer_id, product_id, created_at)
VALUES (:id, :event_id, :user_id, :kind, :transfer_id, :product_id, duly.now())
ON CONFLICT (event_id) DO NOTHING
""")


# -- products --------------------------------------------------------------------------------------------------------


async def insert_product(tx: Tx, *, product_id: UUID, name: str, owner_id: str) -> Product:
    """Write a new one."""
    values = {"id": product_id, "name": name, "owner_id": owner_id}
    return Product(**(await tx.execute(INSERT_PRODUCT, values)).mappings().one())


async def lock_product(tx: Tx, product_id: UUID) -> Product | None:
    """Be alone with it until the transaction ends."""
    row = (await tx.execute(LOCK_PRODUCT, {"id": product_id})).mappings().one_or_none()
    return Product(**row) if row else None


async def lock_product_of(tx: Tx, transfer_id: UUID) -> Product | None:
    """The same for the product of a transfer; None when there is no such transfer."""
    row = (await tx.execute(LOCK_PRODUCT_OF_TRANSFER, {"transfer_id": transfer_id})).mappings().one_or_none()
    return Product(**row) if row else None


async def change_owner(tx: Tx, product_id: UUID, *, owner_id: str) -> None:
    """It belongs to somebody else now."""
    await tx.execute(CHANGE_OWNER, {"id": product_id, "owner_id": owner_id})


async def find_product_details(tx: Tx, product_id: UUID, *, limit: int) -> ProductDetails | None:
    """A product with its pending transfer and its newest requests."""
    rows = (await tx.execute(FIND_PRODUCT_DETAILS, {"id": product_id, "limit": limit})).mappings().all()
    if not rows:
        return None
    first = rows[0]
    product = Product(first["id"], first["name"], first["owner_id"], first["created_at"])
    requests = tuple(
        ServiceRequest(
            row["request_id"], product.id, row["requested_by"], row["description"], RequestStatus(row["status"]),
            row["requested_at"], row["updated_at"],
        )
        for row in rows
        if row["request_id"] is not None
    )  # fmt: skip
    return ProductDetails(product, first["pending_transfer_id"], first["pending_for"], requests)


# -- transfers -------------------------------------------------------------------------------------------------------


async def insert_transfer(
    tx: Tx, *, transfer_id: UUID, product_id: UUID, from_user_id: str, to_user_id: str
) -> Transfer | None:
    """Write a new, pending one; None when the product has one."""
    values = {"id": transfer_id, "product_id": product_id, "from_user_id": from_user_id, "to_user_id": to_user_id}
    row = (await tx.execute(INSERT_TRANSFER, values)).mappings().one_or_none()
    return _transfer(row) if row else None


async def find_transfer(tx: Tx, transfer_id: UUID) -> Transfer | None:
    """One by its id."""
    row = (await tx.execute(select(transfers).where(transfers.c.id == transfer_id))).mappings().one_or_none()
    return _transfer(row) if row else None


async def list_transfers(
    tx: Tx,
    *,
    statuses: Sequence[TransferStatus],
    product_id: UUID | None,
    before: tuple[datetime, UUID],
    limit: int,
) -> list[tuple[Transfer, str]]:
    """The newest first, with the names of their products."""
    values = {"statuses": [status.value for status in statuses], "before_at": before[0], "before_id": before[1]}
    if product_id is None:
        found = await tx.execute(LIST_TRANSFERS, {**values, "limit": limit})
    else:
        found = await tx.execute(LIST_TRANSFERS_OF_PRODUCT, {**values, "product_id": product_id, "limit": limit})
    rows = [dict(row) for row in found.mappings()]
    return [(_transfer(row), name) for row in rows if (name := row.pop("product_name"))]


async def count_transfers(tx: Tx, *, cap: int) -> dict[str, int]:
    """How many there are of each status, counted no further than this."""
    found = await tx.execute(COUNT_TRANSFERS, {"statuses": [status.value for status in TransferStatus], "cap": cap})
    return {row["status"]: row["number"] for row in found.mappings()}


async def lock_transfer(tx: Tx, transfer_id: UUID) -> tuple[Transfer, datetime]:
    """One whose product we have locked, as it is now, and what time that is."""
    return _transfer_now((await tx.execute(LOCK_TRANSFER, {"id": transfer_id})).mappings().one())


async def lock_pending_transfer(tx: Tx, product_id: UUID) -> tuple[Transfer, datetime] | None:
    """The pending one of a product we have locked, and what time it is."""
    row = (await tx.execute(LOCK_PENDING_TRANSFER, {"product_id": product_id})).mappings().one_or_none()
    return _transfer_now(row) if row else None


async def end_transfer(tx: Tx, ended: Transfer) -> None:
    """Write what a pending one has become."""
    values = {"id": ended.id, "status": ended.status.value, "updated_at": ended.updated_at}
    (await tx.execute(END_TRANSFER, values)).one()  # nobody else could end it: its product is locked


async def lock_products_of_due_transfers(tx: Tx, *, limit: int) -> list[UUID]:
    """The products whose pending transfers are the longest overdue."""
    return list((await tx.execute(LOCK_PRODUCTS_OF_DUE_TRANSFERS, {"limit": limit})).scalars())


async def expire_due_transfers(tx: Tx, product_ids: Sequence[UUID]) -> list[Transfer]:
    """End what is still pending and overdue of these products; the oldest first."""
    result = await tx.execute(EXPIRE_DUE_TRANSFERS, {"product_ids": list(product_ids)})
    return sorted((_transfer(row) for row in result.mappings()), key=lambda expired: (expired.created_at, expired.id))


# -- service requests ------------------------------------------------------------------------------------------------


async def insert_request(
    tx: Tx, *, request_id: UUID, product_id: UUID, requested_by: str, description: str, status: RequestStatus, most: int
) -> ServiceRequest | None:
    """Write a new one, on a product we have locked; None when it has as many open ones as it may have."""
    values = {"id": request_id, "product_id": product_id, "requested_by": requested_by, "description": description}
    made = await tx.execute(INSERT_REQUEST, {**values, "status": status.value, "most": most})
    row = made.mappings().one_or_none()
    return _request(row) if row else None


async def move_requests(tx: Tx, product_ids: Sequence[UUID], move: RequestMove) -> None:
    """Pause, resume or cancel the requests of products we have locked."""
    was = [status.value for status in move.was]
    await tx.execute(MOVE_REQUESTS, {"product_ids": list(product_ids), "was": was, "becomes": move.becomes.value})


async def find_request(tx: Tx, request_id: UUID) -> tuple[ServiceRequest, str] | None:
    """One by its id, and who owns its product."""
    row = (await tx.execute(FIND_REQUEST, {"id": request_id})).mappings().one_or_none()
    if row is None:
        return None
    values = dict(row)
    owner_id: str = values.pop("owner_id")
    return _request(values), owner_id


# -- notices ---------------------------------------------------------------------------------------------------------


async def insert_notice(
    tx: Tx, *, notice_id: UUID, event_id: UUID, user_id: str, kind: NoticeKind, transfer_id: UUID, product_id: UUID
) -> None:
    """Tell a user once about an event."""
    values = {"id": notice_id, "event_id": event_id, "user_id": user_id, "kind": kind.value}
    await tx.execute(INSERT_NOTICE, {**values, "transfer_id": transfer_id, "product_id": product_id})


async def forget_notices(tx: Tx, *, days: int, limit: int) -> int:
    """Delete the oldest that are older than this, by their time-ordered id; how many."""
    gone: int = (await tx.execute(FORGET_NOTICES, {"days": days, "limit": limit})).scalar_one()
    return gone


async def list_notices(tx: Tx, *, user_id: str, before: UUID | None, limit: int) -> list[Notice]:
    """A user's, the newest first; ids are ordered by time."""
    query = select(notices).where(notices.c.user_id == user_id).order_by(notices.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(notices.c.id < before)
    return [Notice(**{**row, "kind": NoticeKind(row["kind"])}) for row in (await tx.execute(query)).mappings()]


def _transfer(row: Mapping[Any, Any]) -> Transfer:
    return Transfer(**{**row, "status": TransferStatus(row["status"])})


def _transfer_now(row: Mapping[Any, Any]) -> tuple[Transfer, datetime]:
    values = dict(row)
    now: datetime = values.pop("now")
    return _transfer(values), now


def _request(row: Mapping[Any, Any]) -> ServiceRequest:
    return ServiceRequest(**{**row, "status": RequestStatus(row["status"])})
