"""Every route and everybody who may not: a route without an entry here fails the build (T1, T4, E5.1)."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.routing import APIRoute

from apps.transfers.api import router
from tests.apps.transfers.acting import EXPIRE, Users, check_consistent
from tests.support import rows

# method and path: a body, and who may not although they have the scope (the owner is alice, the recipient bob)
ROUTES: dict[tuple[str, str], tuple[Any, list[str]]] = {
    ("POST", "/v1/products"): ({"name": "Lathe"}, []),
    ("GET", "/v1/products/{product_id}"): (None, ["mallory"]),
    ("POST", "/v1/products/{product_id}/transfers"): ({"toUserId": "carol"}, ["bob", "mallory"]),
    ("GET", "/v1/transfers/{transfer_id}"): (None, ["mallory"]),
    ("POST", "/v1/transfers/{transfer_id}/accept"): ({}, ["alice", "mallory"]),
    ("POST", "/v1/transfers/{transfer_id}/reject"): ({}, ["alice", "mallory"]),
    ("POST", "/v1/transfers/{transfer_id}/cancel"): ({}, ["bob", "mallory"]),
    ("POST", "/v1/products/{product_id}/service-requests"): ({"description": "Oil it"}, ["bob", "mallory"]),
    ("GET", "/v1/service-requests/{request_id}"): (None, ["bob", "mallory"]),
    ("GET", "/v1/notices"): (None, []),
    ("POST", EXPIRE): ({}, []),
}
STATE = """
SELECT (SELECT array_agg(p ORDER BY p.id) FROM transfers.products p)::text,
       (SELECT array_agg(t ORDER BY t.id) FROM transfers.transfers t)::text,
       (SELECT array_agg(r ORDER BY r.id) FROM transfers.service_requests r)::text,
       (SELECT count(*) FROM duly.event_log)
"""


def test_every_route_is_in_the_table() -> None:
    served = {
        (method, route.path) for route in router.routes if isinstance(route, APIRoute) for method in route.methods or ()
    }
    assert served == set(ROUTES)


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_nobody_gets_in_without_the_right(users: Users, dsn: str, method: str, path: str) -> None:
    """401 without a valid token, 403 without the scope or the object; and nothing has changed."""
    product = await users.register()
    request, transfer = await users.request(product), await users.offer(product)
    where = path.format(product_id=product, transfer_id=transfer, request_id=request)
    body, strangers = ROUTES[method, path]
    right, wrong = ("internal:transfers.expire", "transfers") if path == EXPIRE else ("transfers", "quality")
    before = rows(dsn, STATE)

    async def ask(headers: dict[str, str]) -> int:
        answer = await users.api.client.request(method, where, json=body, headers=headers)
        assert answer.headers["content-type"] == "application/problem+json"
        return answer.status_code

    expired = users.api.issuer.sign("alice", scopes=[right], ttl_seconds=1)
    assert await ask({}) == 401
    assert await ask({"Authorization": "Bearer nonsense"}) == 401
    assert await ask({"Authorization": f"Bearer {expired[:-8]}AAAAAAAA"}) == 401
    assert await ask(users.api.headers("alice", wrong)) == 403
    assert await ask(users.api.headers("alice", "transfers.expire internal")) == 403
    for stranger in strangers:
        assert await ask(users.api.headers(stranger, right)) == 403
    assert rows(dsn, STATE) == before
    check_consistent(dsn)


async def test_a_user_cannot_sweep_and_a_service_cannot_own(users: Users) -> None:
    """T4: neither scope includes the other, whatever the roles."""
    headers = users.api.headers("alice", "transfers console", "ADMINISTRATOR")
    assert (await users.api.client.post(EXPIRE, json={}, headers=headers)).status_code == 403
    headers = users.api.headers("service-account-transfers-worker", "internal:transfers.expire")
    answer = await users.api.client.post("/v1/products", json={"name": "Lathe"}, headers=headers)
    assert answer.status_code == 403


async def test_who_lost_the_offer_no_longer_sees_the_product(users: Users) -> None:
    """The recipient of a pending transfer reads it; after the rejection they are a stranger again."""
    product = await users.register()
    transfer = await users.offer(product)
    assert (await users.get("bob", f"/v1/products/{product}")).status_code == 200
    await users.end("bob", transfer, "reject")
    assert (await users.get("bob", f"/v1/products/{product}")).status_code == 403
    assert (await users.get("bob", f"/v1/transfers/{transfer}")).status_code == 200
