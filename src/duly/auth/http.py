"""The rights a route needs, as a dependency: ``caller: Annotated[Principal, Depends(Require("quality"))]``."""

# no "from __future__ import annotations": some FastAPIs we allow cannot resolve the names in a callable object's hints

import re
from typing import TYPE_CHECKING, Any

from fastapi import Depends, Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase

from duly.auth.challenges import insufficient_scope, invalid_request, no_credentials
from duly.auth.principals import Principal
from duly.errors import Refused

if TYPE_CHECKING:
    from duly.auth.tokens import Verifier

_WORD = re.compile(r"[\x21\x23-\x5B\x5D-\x7E]{1,200}")  # RFC 6749: what a scope may consist of


class Require(SecurityBase):
    """A valid token with this scope and, where roles are named, at least one of them."""

    def __init__(self, scope: str, *roles: str) -> None:
        if not _WORD.fullmatch(scope) or not all(roles):
            raise ValueError(f"{scope!r} with {roles!r} cannot be asked for")
        self.scope = scope
        self.roles = frozenset(roles)
        self.model = HTTPBearer(bearerFormat="JWT", description="A token of the OpenID provider.")
        self.scheme_name = "bearer"

    def __repr__(self) -> str:
        return f"Require({', '.join(map(repr, (self.scope, *sorted(self.roles))))})"

    async def __call__(self, request: Request) -> Principal:
        """Who calls, or 401, or 403; ``request.state.principal`` is set for those who come after."""
        principal: Principal | None = getattr(request.state, "principal", None)  # set here alone, once verified
        if principal is None:
            principal = await _verifier(request).verify(_bearer_token(request))
        self.check(principal)
        request.state.principal = principal
        return principal

    def check(self, principal: Principal) -> None:
        """Raise Forbidden unless the rights suffice."""
        if self.scope not in principal.scopes:
            raise insufficient_scope(f"this needs a token with the scope {self.scope}", self.scope)
        if self.roles and self.roles.isdisjoint(principal.roles):
            wanted = " or ".join(sorted(self.roles))
            raise insufficient_scope(f"this needs the role {wanted}", self.scope)


def require(scope: str, *roles: str) -> Any:
    """``Depends(Require(...))``, for the list of a router's or a route's dependencies."""
    return Depends(Require(scope, *roles))


def _verifier(request: Request) -> "Verifier":
    verifier: Verifier | None = getattr(request.app.state, "verifier", None)
    if verifier is None:
        raise Refused("this server verifies no tokens: set app.state.verifier (duly.auth.setup.create_verifier)")
    return verifier


def _bearer_token(request: Request) -> str:
    """The token of the only Authorization header."""
    values = request.headers.getlist("authorization")
    if len(values) > 1:
        raise invalid_request("there is more than one Authorization header")
    scheme, _, token = values[0].partition(" ") if values else ("", "", "")
    if scheme.lower() != "bearer":
        raise no_credentials()
    token = token.strip(" ")
    if not token:
        raise invalid_request("the Authorization header holds no token")
    return token
