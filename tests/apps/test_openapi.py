"""Schemathesis over the whole OpenAPI: no 5xx, and every answer is one that the document promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import negative_data_rejection, positive_data_acceptance

from apps.wiring import app
from duly.auth.issuer import Issuer
from duly.settings import Settings
from duly.testing import TestServer
from tests.apps.test_rights import NEW_ACCOUNT, NEW_ORDER, NEW_RULE, NEW_SUBSCRIPTION, NEW_USER, RIGHTS
from tests.engine.cli.commands import environment, free_port, running, status, wait_until

pytestmark = pytest.mark.timeout(300)
EXAMPLES = 25
OPERATIONS = [f"{method} {path}" for method, path in RIGHTS] + [
    "POST /v1/webhooks/payments/{provider_id}", "POST /v1/webhooks/kyc/{provider_id}",
    "GET /healthz", "GET /readyz", "GET /metrics", "POST /dev-issuer/token", "GET /dev-issuer/jwks",
    "GET /dev-issuer/.well-known/openid-configuration",
]  # fmt: skip
WITHOUT_ARGUMENTS = {label for label in OPERATIONS if label.startswith(("GET /healthz", "GET /readyz", "GET /metrics"))}
WITHOUT_ARGUMENTS |= {label for label in OPERATIONS if label.startswith("GET /dev-issuer")}
KNOWS_WHAT_DAY_IT_IS = {"POST /user", "PUT /user/{user_id}"}
KNOWS_THE_DIGITS_OF_CURRENCIES = {"POST /v1/orders", "PUT /v1/carts/{cart_id}/items/{sku}"}
# Where a URL may lead, when a secret is base64, what a stored answer may hold, and that since is before until.
KNOWS_MORE_THAN_A_SCHEMA = {
    # That debits equal credits, that there is enough, what a reversal is called, and where the last page ended.
    "POST /v1/transactions", "POST /v1/transactions/batch", "POST /v1/accounts/{account_id}/holds",
    "POST /v1/holds/{hold_id}/capture", "GET /v1/ledger/check",
    # Which reasons are for which decision, and that a reference is no content.
    "POST /v1/compliance/cases/{case_id}/resolve", "POST /v1/compliance/cases/{case_id}/evidence",
    # That both accounts are there, and differ; and how a signature is made.
    "POST /v1/payments", "POST /v1/webhooks/payments/{provider_id}", "POST /v1/webhooks/kyc/{provider_id}",
    # Which providers there are, and that one asks for a person or for a status.
    "POST /v1/kyc/sessions", "GET /v1/kyc/sessions",
    "POST /v1/webhooks/subscriptions", "PATCH /v1/webhooks/subscriptions/{subscription_id}",
    "POST /v1/webhooks/subscriptions/{subscription_id}/rotate",
    "POST /v1/webhooks/subscriptions/{subscription_id}/redeliver",
}  # fmt: skip
# That a text has no NUL in it, which parts of a filter go together, what a cron expression is.
KNOWS_WHAT_CAN_BE_ASKED = {
    "GET /v1/console/jobs", "GET /v1/console/executions", "GET /v1/console/dead-letters", "GET /v1/console/events",
    "GET /v1/console/alerts", "GET /v1/console/schedules/preview",
}  # fmt: skip
# What a condition may be, which fields there are, which dates are before which, and what cannot be stored.
KNOWS_MORE_THAN_A_SCHEMA |= {label for label in OPERATIONS if "/v1/decision/" in label}
CASES = [(label, GenerationMode.POSITIVE) for label in OPERATIONS]
CASES += [(label, GenerationMode.NEGATIVE) for label in OPERATIONS if label not in WITHOUT_ARGUMENTS]


@dataclass(frozen=True)
class Served:
    """A running ``duly api``, its document, a token with every right, and things that exist."""

    url: str
    operations: dict[str, Any]
    headers: dict[str, str]
    existing: dict[str, str]


@pytest.fixture(scope="module")
def served(server: TestServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("openapi")
    with server.database(app) as dsn:
        env = environment(
            DULY_APP="apps.wiring:app", DATABASE_URL=dsn, DULY_DATA=str(home), PORT=str(free_port()),
            DULY_ALLOW_UNSAFE_DATABASE="1", DULY_LOG_LEVEL="warning",
        )  # fmt: skip
        url = f"http://127.0.0.1:{env['PORT']}"
        with running("api", env=env, log=home / "log"):
            wait_until(lambda: status(f"{url}/readyz") == 200)
            headers = _headers(home, int(env["PORT"]))
            schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
            found: list[Any] = list(schema.get_all_operations())
            operations = {operation.ok().label: operation.ok() for operation in found}
            yield Served(url, operations, headers, _existing(url, headers))
        assert "request_failed" not in (home / "log").read_text()


def _headers(home: Path, port: int) -> dict[str, str]:
    scopes = {right.scope for right in RIGHTS.values()}
    roles = {role for right in RIGHTS.values() for role in right.roles}
    token = Issuer.open(Settings(data=home), port=port).sign("alice", scopes=sorted(scopes), roles=sorted(roles))
    return {"Authorization": f"Bearer {token}"}


def _existing(url: str, headers: dict[str, str]) -> dict[str, str]:
    """One of each, by the name of the path's parameter."""

    def make(path: str, body: dict[str, Any]) -> str:
        answer = httpx2.post(url + path, json=body, headers=headers)
        assert answer.status_code == 201, answer.text
        made = answer.json()
        return str(made.get("user", made)["id"])

    subscription = make("/v1/webhooks/subscriptions", NEW_SUBSCRIPTION)
    tested = httpx2.post(f"{url}/v1/webhooks/subscriptions/{subscription}/test", headers=headers).json()
    product = make("/v1/products", {"name": "Lathe"})
    debit, credit = make("/v1/accounts", NEW_ACCOUNT), make("/v1/accounts", NEW_ACCOUNT)
    lines = [{"accountId": a, "amount": "9.00", "direction": d} for a, d in ((debit, "DEBIT"), (credit, "CREDIT"))]
    order = make("/v1/orders", NEW_ORDER)
    httpx2.put(f"{url}/v1/decision/lists/some", json={"members": ["a"]}, headers=headers).raise_for_status()
    question = {"ruleSetId": "payment-screening", "context": {"amount": "5"}}
    decided = httpx2.post(f"{url}/v1/decision/evaluate", json=question, headers=headers).json()
    return {
        "account_id": debit,
        "transaction_id": make("/v1/transactions", {"reference": "sample", "entries": lines}),
        "hold_id": make(f"/v1/accounts/{debit}/holds", {"amount": "1.00", "reference": "sample"}),
        "payment_id": _pay(url, headers, credit, debit),
        "callback_id": "019c0000-0000-7000-8000-000000000001",  # nobody kept one
        "provider_id": "bank",
        "session_id": str(
            httpx2.post(f"{url}/v1/kyc/sessions", json={"userId": "user-1"}, headers=headers).json()["sessionId"]
        ),
        "case_id": "019c0000-0000-7000-8000-000000000002",  # nothing is held
        "rule_id": make("/v1/decision/rules", NEW_RULE),
        "rule_set_id": "aml-screening",
        "list_id": "some",
        "decision_id": str(decided["id"]),
        "subscription_id": subscription,
        "delivery_id": str(tested["id"]),
        "order_id": order,
        "token": str(httpx2.post(f"{url}/v1/orders/{order}/links", headers=headers).json()["token"]),
        "cart_id": make("/v1/carts", {"currency": "PLN"}),
        "sku": "tea",
        "nc_id": make("/ncs", {"supplier_id": "s", "severity": "LOW", "description": "d"}),
        "product_id": product,
        "request_id": make(f"/v1/products/{product}/service-requests", {"description": "d"}),
        "transfer_id": make(f"/v1/products/{product}/transfers", {"toUserId": "bob"}),
        "user_id": make("/user", NEW_USER),
        "id": "1",
        "name": "duly.forget-audit",
    }


def _pay(url: str, headers: dict[str, str], payer: str, payee: str) -> str:
    """A payment, kept although there is no cover."""
    body = {"from": payer, "to": payee, "amount": "5.00", "currency": "PLN"}
    return str(httpx2.post(f"{url}/v1/payments", json=body, headers=headers).json()["paymentId"])


def test_the_document_describes_every_operation_and_no_other(served: Served) -> None:
    assert set(served.operations) == set(OPERATIONS)


@pytest.mark.parametrize(("label", "mode"), CASES)
def test_every_answer_is_as_documented(served: Served, label: str, mode: GenerationMode) -> None:
    operation = served.operations[label]
    names = [part[1:-1] for part in label.split("/") if part.startswith("{")]
    fixed = {name: served.existing[name] for name in names}
    # A query with one parameter more than we know is answered, as everywhere on the web.
    excluded = [negative_data_rejection] if label.startswith("GET") else []
    # Nor can a schema say what is in the future.
    excluded += [positive_data_acceptance] if label in KNOWS_WHAT_DAY_IT_IS else []
    # Nor can a schema say how many digits a price may have in the currency that another member names.
    excluded += [positive_data_acceptance] if label in KNOWS_THE_DIGITS_OF_CURRENCIES else []
    excluded += [positive_data_acceptance] if label in KNOWS_MORE_THAN_A_SCHEMA else []
    # Nor what a cron expression is, which version is the current one, or where a URL may lead.
    excluded += [positive_data_acceptance] if "/v1/console/actions/" in label else []
    excluded += [positive_data_acceptance] if label in KNOWS_WHAT_CAN_BE_ASKED else []
    for path_parameters in [None, fixed] if fixed and operation.body else [None]:
        strategy = operation.as_strategy(generation_mode=mode, path_parameters=path_parameters)

        @given(case=strategy)
        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        def check(case: Any) -> None:
            response = case.call(base_url=served.url, headers=served.headers)
            case.validate_response(response, headers=served.headers, excluded_checks=excluded)

        check()
