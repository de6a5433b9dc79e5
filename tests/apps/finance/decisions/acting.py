"""Those who write rules and those who ask, over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx2

from tests.apps.conftest import Api

FIELDS = {
    "amount": "decimal", "currency": "string", "from": "string", "to": "string", "count": "integer",
    "customer.country": "string",
}  # fmt: skip
LARGE = {"field": "amount", "op": "gt", "value": "1000.00"}


@dataclass(frozen=True)
class Office:
    """An administrator and a caller of one server."""

    api: Api

    @property
    def admin(self) -> dict[str, str]:
        """Who may change rules."""
        return self.api.headers("ada", "decision:admin", "DECISION_ADMIN")

    @property
    def caller(self) -> dict[str, str]:
        """Who may ask."""
        return self.api.headers("payments", "decision:evaluate")

    async def ask(self, method: str, path: str, body: Any = None) -> httpx2.Response:
        """One request of the administrator's."""
        return await self.api.client.request(method, f"/v1/decision{path}", json=body, headers=self.admin)

    async def get(self, path: str) -> Any:
        """What is there."""
        answer = await self.ask("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def make_set(self, name: str = "screening", **settings: Any) -> Any:
        """A rule set."""
        body = {"id": name, "description": "For tests", "settings": {"fields": FIELDS, **settings}}
        answer = await self.ask("POST", "/rule-sets", body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def write(
        self, conditions: Any = LARGE, *, rule_set: str = "screening", decision: str | None = "REVIEW", **more: Any
    ) -> httpx2.Response:
        """Try to make a rule."""
        action = {"decision": decision} if decision else {}
        body = {"ruleSetId": rule_set, "name": "A rule", "conditions": conditions, "action": action, **more}
        return await self.ask("POST", "/rules", body)

    async def draft(self, conditions: Any = LARGE, **more: Any) -> Any:
        """A draft."""
        answer = await self.write(conditions, **more)
        assert answer.status_code == 201, answer.text
        return answer.json()

    async def activate(self, rule: Any, **order: Any) -> Any:
        """Make a rule decide."""
        answer = await self.ask("POST", f"/rules/{rule['id']}/activate", order)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def rule(self, conditions: Any = LARGE, **more: Any) -> Any:
        """An active rule."""
        return await self.activate(await self.draft(conditions, **more))

    async def evaluate(self, context: Any, *, rule_set: str = "screening", **more: Any) -> Any:
        """A decision."""
        body = {"ruleSetId": rule_set, "context": context, **more}
        answer = await self.api.client.post("/v1/decision/evaluate", json=body, headers=self.caller)
        assert answer.status_code == 200, answer.text
        return answer.json()
