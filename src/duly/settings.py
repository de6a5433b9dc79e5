"""Configuration from the environment; every name starts with ``DULY_`` except the customary ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


class Settings(BaseSettings):
    """What an operator can set. Defaults are those of the embedded development server."""

    model_config = SettingsConfigDict(env_prefix="DULY_", env_file=None, extra="ignore")

    env: Literal["development", "production"] = "development"
    database_url: str = Field(default="", validation_alias="DATABASE_URL")
    port: int = Field(default=8000, ge=0, le=65535, validation_alias="PORT")
    host: str = "127.0.0.1"
    health_port: int = Field(default=0, ge=0, le=65535)
    data: Path = Path(".duly")
    app: str = ""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"

    pool_size: int = Field(default=10, ge=1, le=500)
    statement_timeout_seconds: float = Field(default=30.0, gt=0)
    connect_timeout_seconds: float = Field(default=5.0, gt=0)
    allow_unsafe_database: bool = False  # for a server that may lose data, such as one of a test run

    concurrency: int = Field(default=10, ge=1, le=10_000)
    processes: int = Field(default=1, ge=1, le=256)
    lease_seconds: float = Field(default=300.0, gt=0)
    job_timeout_seconds: float = Field(default=3600.0, gt=0)
    shutdown_grace_seconds: float = Field(default=20.0, ge=0)
    poll_seconds: float = Field(default=1.0, gt=0)

    body_bytes: int = Field(default=1_048_576, ge=1_024, le=104_857_600)
    idempotency_ttl_hours: int = Field(default=24, ge=1, le=8_760)

    oidc_issuer: str = ""  # empty: the development issuer, in development
    oidc_audience: str = Field(default="duly", min_length=1)
    oidc_jwks_url: str = ""
    oidc_role_clients: Annotated[tuple[str, ...], NoDecode] = ()
    oidc_allow_http: bool = False
    jwks_stale_seconds: float = Field(default=3600.0, ge=600, le=86_400)
    client_id: str = "service"
    client_secret: SecretStr = SecretStr("")
    api_url: str = ""

    console_url: str = ""  # where browsers see this server, when a proxy is in between
    console_client_id: str = Field(default="duly-console", min_length=1)
    console_client_secret: SecretStr = SecretStr("")  # empty: a public client, which PKCE is for

    relay_batch: int = Field(default=100, ge=1, le=10_000)
    publish_attempts: int = Field(default=5, ge=1, le=100)

    broker: SecretStr = SecretStr("")  # where the relay publishes to; empty: PostgreSQL is enough
    receive: SecretStr = SecretStr("")  # what a receiver reads; empty: nothing
    receive_topics: Annotated[tuple[str, ...], NoDecode] = ()  # empty: those of the events that are declared
    receive_group: str = Field(default="duly", pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,59}$")
    receive_batch: int = Field(default=200, ge=1, le=10_000)
    receive_ahead: int = Field(default=10_000, ge=1, le=10_000_000)

    keep_events_days: int = Field(default=30, ge=1)
    keep_executions_days: int = Field(default=30, ge=1)
    keep_processed_days: int = Field(default=30, ge=1)
    keep_dead_letters_days: int = Field(default=90, ge=1)
    keep_audit_days: int = Field(default=730, ge=1)

    webhook_concurrency: int = Field(default=50, ge=1, le=10_000)
    webhook_allow_private: Annotated[tuple[str, ...], NoDecode] = ()  # networks, or true
    webhook_allow_http: bool = False
    webhook_disable_days: float = Field(default=5.0, gt=0, le=3650)
    keep_webhooks_days: int = Field(default=30, ge=1)
    encryption_keys: SecretStr = SecretStr("")  # id:base64, the newest first

    @property
    def idle_transaction_seconds(self) -> float:
        """How long a transaction may stand still, with all its locks, before the server ends it."""
        return max(60.0, self.statement_timeout_seconds)

    @property
    def webhook_sessions(self) -> int:
        """Database sessions of the deliveries: each needs one for milliseconds, before and after it is sent."""
        return min(self.webhook_concurrency, 10)

    @field_validator("oidc_role_clients", "webhook_allow_private", "receive_topics", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        """A comma-separated list, or one in JSON."""
        if not isinstance(value, str):
            return value
        if value.strip().startswith("["):
            return json.loads(value)
        return tuple(name for name in (part.strip() for part in value.split(",")) if name)

    def wants_embedded(self) -> bool:
        """Whether nothing points at a PostgreSQL of the user's own."""
        return not self.database_url and not any(os.environ.get(name) for name in ("PGHOST", "PGSERVICE"))
