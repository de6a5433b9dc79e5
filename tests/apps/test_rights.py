"""Every route and every kind of token (Rights, FAULTS): a route without an entry here fails the build."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from fastapi.routing import iter_route_contexts
from joserfc import jwt

from duly.auth.http import Require
from duly.operate.actions import ACTIONS
from tests.apps.conftest import Api

ANYBODY = frozenset(
    {
        "/", "/front.css", "/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect",
        "/redoc",
        "/dev-issuer/.well-known/openid-configuration", "/dev-issuer/jwks", "/dev-issuer/token",
        "/dev-issuer/authorize", "/dev-issuer/sign-in.css",
        "/v1/webhooks/payments/{provider_id}", "/v1/webhooks/kyc/{provider_id}",  # the signature is the credential
        "/v1/kyc/start/{session_id}/{token}",  # the token is
    }
)  # fmt: skip
ELSEWHERE = ("/console", "/sandbox")  # for people with sessions (tests/console); not served in production


@dataclass(frozen=True)
class Right:
    """What a route needs, and a request that is valid in every other respect."""

    scope: str
    roles: tuple[str, ...] = ()
    lower_roles: tuple[str, ...] = ("NOBODY",)
    body: dict[str, Any] | None = None
    expected: frozenset[int] = field(default_factory=lambda: frozenset({200, 201, 204, 404}))


QUALITY = ("QUALITY_ENGINEER", "QUALITY_MANAGER")
NEW_NC = {"supplier_id": "s", "severity": "LOW", "description": "d"}
NEW_USER = {"firstName": "Ada", "lastName": "L", "dateOfBirth": "1990-12-10", "timezone": "Europe/London"}
NEW_ORDER = {"currency": "PLN", "items": [{"sku": "a", "quantity": 1, "unitPrice": "1.00"}]}
WEBHOOKS = ("WEBHOOK_ADMIN",)
NEW_SUBSCRIPTION = {"url": "https://hooks.example.com/duly", "events": ["order.*"]}
NEW_ACCOUNT = {"name": "Cash", "type": "ASSET", "currency": "PLN"}
LEDGER = ("LEDGER_READER", "LEDGER_WRITER", "LEDGER_POSTER", "LEDGER_REVERSER")
WRITER, POSTER, REVERSER = ("LEDGER_WRITER",), ("LEDGER_POSTER",), ("LEDGER_REVERSER",)
NO_POSTER, NO_REVERSER = ("LEDGER_READER", "LEDGER_WRITER", "LEDGER_REVERSER"), ("LEDGER_READER", "LEDGER_POSTER")
NOWHERE = frozenset({422})  # its accounts are not there
NEW_ENTRIES = [{"accountId": str(uuid4()), "amount": "1.00", "direction": one} for one in ("DEBIT", "CREDIT")]
NEW_TRANSACTION = {"reference": "r", "entries": NEW_ENTRIES}
NEW_PAYMENT = {"from": str(uuid4()), "to": str(uuid4()), "amount": "1.00", "currency": "PLN"}
INITIATOR = ("PAYMENTS_INITIATOR",)
OFFICER = ("COMPLIANCE_OFFICER",)
CASE_BODIES: dict[str, dict[str, Any] | None] = {
    "claim": None, "unclaim": None, "confirm": None, "assign": {"assignee": "otto"}, "comments": {"text": "t"},
    "evidence": {"reference": "vault:1"}, "refuse": {"reason": "r"}, "reopen": {"reason": "r"},
    "resolve": {"decision": "REJECT", "reasonCode": "FRAUD", "reason": "r"},
}  # fmt: skip
KYC = ("KYC_AGENT",)
RULES = ("DECISION_ADMIN",)
NEW_RULE = {
    "ruleSetId": "payment-screening", "name": "Large", "action": {"decision": "REVIEW"},
    "conditions": {"field": "amount", "op": "gt", "value": "1000.00"},
}  # fmt: skip
CHANGED_RULE = {name: part for name, part in NEW_RULE.items() if name != "ruleSetId"}
CHANGED_SET = {"description": "d", "settings": {"fields": {"amount": "decimal"}}}
RIGHTS: dict[tuple[str, str], Right] = {
    ("POST", "/v1/accounts"): Right("ledger:write", WRITER, ("LEDGER_READER", "LEDGER_POSTER"), NEW_ACCOUNT),
    ("GET", "/v1/accounts"): Right("ledger:read", LEDGER),
    ("GET", "/v1/accounts/{account_id}"): Right("ledger:read", LEDGER),
    ("GET", "/v1/accounts/{account_id}/balance"): Right("ledger:read", LEDGER),
    ("GET", "/v1/accounts/{account_id}/entries"): Right("ledger:read", LEDGER),
    ("POST", "/v1/accounts/{account_id}/close"): Right("ledger:write", WRITER, NO_REVERSER),
    ("POST", "/v1/accounts/{account_id}/reopen"): Right("ledger:write", WRITER, NO_REVERSER),
    ("POST", "/v1/transactions"): Right("ledger:write", POSTER, NO_POSTER, NEW_TRANSACTION, NOWHERE),
    ("POST", "/v1/transactions/batch"): Right(
        "ledger:write", POSTER, NO_POSTER, {"transactions": [NEW_TRANSACTION]}, NOWHERE
    ),
    ("GET", "/v1/transactions/{transaction_id}"): Right("ledger:read", LEDGER),
    ("POST", "/v1/transactions/{transaction_id}/reverse"): Right(
        "ledger:write", REVERSER, NO_REVERSER, {"reason": "typo"}
    ),
    ("POST", "/v1/accounts/{account_id}/holds"): Right(
        "ledger:write", POSTER, NO_POSTER, {"amount": "1.00", "reference": "h"}
    ),
    ("GET", "/v1/holds/{hold_id}"): Right("ledger:read", LEDGER),
    ("POST", "/v1/holds/{hold_id}/capture"): Right(
        "ledger:write", POSTER, NO_POSTER, {"toAccountId": str(uuid4()), "reference": "c"}
    ),
    ("POST", "/v1/holds/{hold_id}/void"): Right("ledger:write", POSTER, NO_POSTER),
    ("GET", "/v1/ledger/check"): Right("ledger:read", LEDGER),
    ("POST", "/v1/payments"): Right("payments:initiate", INITIATOR, body=NEW_PAYMENT, expected=NOWHERE),
    ("GET", "/v1/payments"): Right("payments:initiate", INITIATOR),
    ("GET", "/v1/payments/{payment_id}"): Right("payments:initiate", INITIATOR),
    ("GET", "/v1/payments/callbacks/unmatched"): Right("payments:initiate", INITIATOR),
    ("POST", "/v1/payments/callbacks/{callback_id}/dismiss"): Right(
        "payments:admin", ("PAYMENTS_ADMIN",), body={"reason": "seen"}
    ),
    ("POST", "/v1/payments/{payment_id}/resolve"): Right(
        "payments:admin", ("PAYMENTS_ADMIN",), body={"outcome": "RETURN", "reason": "asked the bank"}
    ),
    ("GET", "/v1/compliance/cases"): Right("compliance:resolve", OFFICER),
    ("GET", "/v1/compliance/cases/{case_id}"): Right("compliance:resolve", OFFICER),
    ("GET", "/v1/compliance/cases/{case_id}/timeline"): Right("compliance:resolve", OFFICER),
    **{
        ("POST", f"/v1/compliance/cases/{{case_id}}/{what}"): Right("compliance:resolve", OFFICER, INITIATOR, body)
        for what, body in CASE_BODIES.items()
    },
    ("GET", "/v1/payments/{payment_id}/dossier"): Right(
        "compliance:resolve", ("COMPLIANCE_OFFICER",), ("PAYMENTS_INITIATOR", "PAYMENTS_ADMIN", "KYC_AGENT")
    ),
    ("POST", "/v1/kyc/sessions"): Right("compliance:kyc", KYC, ("COMPLIANCE_OFFICER",), {"userId": "user-1"}),
    ("GET", "/v1/kyc/sessions"): Right("compliance:kyc", KYC),
    ("GET", "/v1/kyc/sessions/{session_id}"): Right("compliance:kyc", KYC),
    ("GET", "/v1/kyc/callbacks/unmatched"): Right("compliance:kyc", KYC),
    ("POST", "/v1/kyc/callbacks/{callback_id}/dismiss"): Right("compliance:kyc", KYC, body={"handled": "NO_ACTION"}),
    ("POST", "/ncs"): Right("quality", QUALITY, body=NEW_NC),
    ("GET", "/ncs"): Right("quality", QUALITY),
    ("GET", "/ncs/{nc_id}"): Right("quality", QUALITY),
    ("PATCH", "/ncs/{nc_id}/close"): Right("quality", ("QUALITY_MANAGER",), ("QUALITY_ENGINEER",)),
    ("POST", "/v1/products"): Right("transfers", body={"name": "Lathe"}),
    ("GET", "/v1/products/{product_id}"): Right("transfers"),
    ("POST", "/v1/products/{product_id}/transfers"): Right("transfers", body={"toUserId": "bob"}),
    ("GET", "/v1/transfers/{transfer_id}"): Right("transfers"),
    ("POST", "/v1/transfers/{transfer_id}/accept"): Right("transfers"),
    ("POST", "/v1/transfers/{transfer_id}/reject"): Right("transfers"),
    ("POST", "/v1/transfers/{transfer_id}/cancel"): Right("transfers"),
    ("POST", "/v1/products/{product_id}/service-requests"): Right("transfers", body={"description": "d"}),
    ("GET", "/v1/service-requests/{request_id}"): Right("transfers"),
    ("GET", "/v1/notices"): Right("transfers"),
    ("POST", "/v1/orders"): Right("commerce", body=NEW_ORDER),
    ("GET", "/v1/orders"): Right("commerce"),
    ("GET", "/v1/orders/{order_id}"): Right("commerce"),
    ("POST", "/v1/orders/{order_id}/pay"): Right("commerce"),
    ("POST", "/v1/orders/{order_id}/links"): Right("commerce"),
    ("GET", "/v1/order-links/{token}"): Right("commerce"),
    ("POST", "/v1/carts"): Right("commerce", body={"currency": "PLN"}),
    ("GET", "/v1/carts/{cart_id}"): Right("commerce"),
    ("PUT", "/v1/carts/{cart_id}/items/{sku}"): Right("commerce", body={"quantity": 1, "unitPrice": "1.00"}),
    ("POST", "/v1/carts/{cart_id}/checkout"): Right("commerce"),
    ("GET", "/v1/currencies/rates"): Right("commerce"),
    ("POST", "/internal/v1/transfers/expire-pending"): Right("internal:transfers.expire", body={}),
    ("POST", "/v1/webhooks/subscriptions"): Right("webhooks", WEBHOOKS, body=NEW_SUBSCRIPTION),
    ("GET", "/v1/webhooks/subscriptions"): Right("webhooks", WEBHOOKS),
    ("GET", "/v1/webhooks/subscriptions/{subscription_id}"): Right("webhooks", WEBHOOKS),
    ("PATCH", "/v1/webhooks/subscriptions/{subscription_id}"): Right("webhooks", WEBHOOKS, body={"description": "d"}),
    ("DELETE", "/v1/webhooks/subscriptions/{subscription_id}"): Right("webhooks", WEBHOOKS),
    ("POST", "/v1/webhooks/subscriptions/{subscription_id}/rotate"): Right("webhooks", WEBHOOKS, body={}),
    ("POST", "/v1/webhooks/subscriptions/{subscription_id}/pause"): Right("webhooks", WEBHOOKS),
    ("POST", "/v1/webhooks/subscriptions/{subscription_id}/resume"): Right("webhooks", WEBHOOKS),
    ("POST", "/v1/webhooks/subscriptions/{subscription_id}/test"): Right("webhooks", WEBHOOKS),
    ("GET", "/v1/webhooks/subscriptions/{subscription_id}/deliveries"): Right("webhooks", WEBHOOKS),
    ("POST", "/v1/webhooks/subscriptions/{subscription_id}/redeliver"): Right(
        "webhooks", WEBHOOKS, body={"since": "2026-01-01T00:00:00Z", "until": "2026-01-02T00:00:00Z"}
    ),
    ("GET", "/v1/webhooks/deliveries/{delivery_id}"): Right("webhooks", WEBHOOKS),
    ("POST", "/v1/webhooks/deliveries/{delivery_id}/redeliver"): Right("webhooks", WEBHOOKS),
    ("POST", "/v1/decision/evaluate"): Right(
        "decision:evaluate", body={"ruleSetId": "payment-screening", "context": {}}
    ),
    ("GET", "/v1/decision/decisions"): Right("decision:admin", RULES, expected=frozenset({400})),
    ("GET", "/v1/decision/decisions/{decision_id}"): Right("decision:admin", RULES),
    ("POST", "/v1/decision/decisions/{decision_id}/replay"): Right("decision:admin", RULES),
    ("POST", "/v1/decision/rules"): Right("decision:admin", RULES, body=NEW_RULE),
    ("GET", "/v1/decision/rules"): Right("decision:admin", RULES),
    ("GET", "/v1/decision/rules/{rule_id}"): Right("decision:admin", RULES),
    ("PUT", "/v1/decision/rules/{rule_id}"): Right("decision:admin", RULES, body=CHANGED_RULE),
    ("GET", "/v1/decision/rules/{rule_id}/versions"): Right("decision:admin", RULES),
    ("POST", "/v1/decision/rules/{rule_id}/activate"): Right("decision:admin", RULES, body={}),
    ("POST", "/v1/decision/rules/{rule_id}/deprecate"): Right("decision:admin", RULES),
    ("POST", "/v1/decision/rules/{rule_id}/dry-run"): Right("decision:admin", RULES, body={}),
    ("POST", "/v1/decision/rule-sets"): Right("decision:admin", RULES, body={"id": "new", **CHANGED_SET}),
    ("GET", "/v1/decision/rule-sets"): Right("decision:admin", RULES),
    ("GET", "/v1/decision/rule-sets/{rule_set_id}"): Right("decision:admin", RULES),
    ("PUT", "/v1/decision/rule-sets/{rule_set_id}"): Right("decision:admin", RULES, body=CHANGED_SET),
    ("GET", "/v1/decision/lists"): Right("decision:admin", RULES),
    ("GET", "/v1/decision/lists/{list_id}"): Right("decision:admin", RULES),
    ("PUT", "/v1/decision/lists/{list_id}"): Right("decision:admin", RULES, body={"members": []}),
    ("POST", "/user"): Right("users", body=NEW_USER),
    ("GET", "/user/{user_id}"): Right("users"),
    ("PUT", "/user/{user_id}"): Right("users", body={"timezone": "Asia/Tokyo"}),
    ("DELETE", "/user/{user_id}"): Right("users"),
    ("GET", "/user/{user_id}/birthdays"): Right("users"),
}
SCHEDULE = {"name": "duly.forget-audit"}
ACTION_BODIES: dict[str, dict[str, Any]] = {
    "dead.retry-all": {}, "dead.discard-all": {}, "events.requeue-all": {}, "events.discard-all": {},
    "events.requeue": {"id": str(uuid4())}, "events.discard": {"id": str(uuid4())},
    "schedules.add": {"name": "new.one", "cron": "0 9 * * *"}, "schedules.edit": {**SCHEDULE, "cron": "0 9 * * *"},
    "schedules.enable": SCHEDULE, "schedules.disable": SCHEDULE, "schedules.trigger": SCHEDULE,
    "schedules.remove": SCHEDULE,
    "consumers.via": {"name": "nobody", "via": "-"},
    "webhooks.add": NEW_SUBSCRIPTION,
    "webhooks.provider-secret": {"provider": "rights"},
    "webhooks.redeliver-range": {"id": str(uuid4()), "since": "2026-01-01T00:00Z", "until": "2026-01-02T00:00Z"},
}  # fmt: skip
ACTION_BODIES |= {
    name: {"id": str(uuid4())} for name in ACTIONS if name.startswith("webhooks.") and name not in ACTION_BODIES
}
RIGHTS |= {
    ("POST", f"/v1/console/actions/{name}"): Right(
        "console", ("ADMINISTRATOR",), ("OPERATOR",), ACTION_BODIES.get(name, {"id": 12345})
    )
    for name in ACTIONS
}
RIGHTS |= {
    ("GET", f"/v1/console/{path}"): Right("console", ("ADMINISTRATOR", "OPERATOR"), expected=frozenset({200, 404, 422}))
    for path in (
        "status", "jobs", "jobs/{id}", "executions", "dead-letters", "dead-letters/groups", "events", "alerts", "audit",
        "schedules", "schedules/preview", "schedules/{name}", "why", "entity", "webhooks", "webhooks/{id}",
        "webhooks/{id}/deliveries", "webhooks/deliveries/{id}", "webhooks/providers",
    )
}  # fmt: skip


def routes_of(api: Api) -> Iterator[tuple[str, str, Any]]:
    """Method, path and route of everything that is served."""
    for context in iter_route_contexts(api.fastapi.routes):
        path = str(getattr(context, "path", ""))
        if path in ANYBODY or path.startswith(ELSEWHERE):
            continue
        for method in sorted(set(getattr(context, "methods", None) or ["?"]) - {"HEAD", "OPTIONS"}):
            yield method, path, context


def rights_declared(dependant: Any) -> list[Require]:
    """What the route's dependencies demand."""
    found = [dependant.call] if isinstance(dependant.call, Require) else []
    return found + [right for inner in dependant.dependencies for right in rights_declared(inner)]


def expired(api: Api, authorization: str) -> str:
    """The same token, an hour after its end."""
    key = api.issuer.keys().keys[0]
    claims = jwt.decode(authorization.removeprefix("Bearer "), key, algorithms=["RS256"]).claims
    past = {name: claims[name] - 3 * 3600 for name in ("iat", "nbf", "exp")}
    return jwt.encode({"alg": "RS256", "kid": key.kid}, {**claims, **past}, key, algorithms=["RS256"])


async def ask(api: Api, key: tuple[str, str], headers: dict[str, str]) -> httpx2.Response:
    """A request that is right in everything but, perhaps, its token."""
    method, template = key
    path = "/".join(str(uuid4()) if part.startswith("{") else part for part in template.split("/"))
    return await api.client.request(method, path, json=RIGHTS[key].body, headers=headers)


async def test_every_route_has_an_entry_and_every_entry_a_route(api: Api) -> None:
    assert {(method, path) for method, path, _ in routes_of(api)} == set(RIGHTS)


async def test_what_a_route_declares_is_what_the_table_says(api: Api) -> None:
    declared = {
        (method, path): [(right.scope, right.roles) for right in rights_declared(context.dependant)]
        for method, path, context in routes_of(api)
    }
    assert declared == {key: [(right.scope, frozenset(right.roles))] for key, right in RIGHTS.items()}


async def test_every_route_that_changes_something_takes_a_key(api: Api) -> None:
    """E4.1: but the one whose answer is a secret, which must not be stored."""
    without = {
        (method.upper(), path)
        for path, operations in api.fastapi.openapi()["paths"].items()
        for method, operation in operations.items()
        if method in {"post", "put", "patch", "delete"}
        and "Idempotency-Key" not in [parameter["name"] for parameter in operation.get("parameters", [])]
    }
    assert without & RIGHTS.keys() == {("POST", "/v1/orders/{order_id}/links")}


@pytest.mark.parametrize("key", RIGHTS, ids=" ".join)
async def test_a_route_answers_each_kind_of_token_as_it_must(api: Api, key: tuple[str, str]) -> None:
    right = RIGHTS[key]
    valid = api.headers("eve", right.scope, *right.roles[:1])["Authorization"]
    other_audience = api.issuer.sign("eve", scopes=[right.scope], roles=right.roles, audience="another")
    tampered = valid[:-6] + ("AAAAAA" if not valid.endswith("AAAAAA") else "BBBBBB")
    refused = {
        "no token": {},
        "no bearer": {"Authorization": valid.removeprefix("Bearer ")},
        "another scheme": {"Authorization": valid.replace("Bearer", "Basic")},
        "garbage": {"Authorization": "Bearer a.b.c"},
        "tampered": {"Authorization": tampered},
        "expired": {"Authorization": f"Bearer {expired(api, valid)}"},
        "another audience": {"Authorization": f"Bearer {other_audience}"},
    }
    for kind, headers in refused.items():
        answer = await ask(api, key, headers)
        assert (kind, answer.status_code) == (kind, 401)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.headers["content-type"] == "application/problem+json"
    forbidden = {
        "wrong scope": api.headers("eve", "other", *right.roles),
        "no scope": api.headers("eve", "", *right.roles),
        "longer scope": api.headers("eve", right.scope + "x", *right.roles),
    }
    if right.roles:
        forbidden["no role"] = api.headers("eve", right.scope)
        forbidden["lower role"] = api.headers("eve", right.scope, *right.lower_roles)
    for kind, headers in forbidden.items():
        answer = await ask(api, key, headers)
        assert (kind, answer.status_code) == (kind, 403)
        assert 'error="insufficient_scope"' in answer.headers["www-authenticate"]
    for role in right.roles or ("",):
        answer = await ask(api, key, api.headers("eve", right.scope, *filter(None, [role])))
        assert answer.status_code in right.expected, answer.text
