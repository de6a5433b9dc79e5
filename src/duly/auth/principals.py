"""Who a request comes from, once its token has been verified."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Principal:
    """A person or a service, and the rights its token carries."""

    subject: str
    issuer: str
    scopes: frozenset[str]
    roles: frozenset[str]
    client_id: str | None

    @property
    def caller(self) -> str:
        """One string for one caller, whichever provider: the scope of idempotency keys."""
        return f"{self.issuer} {self.subject}"  # an issuer has no spaces, so two callers never share one
