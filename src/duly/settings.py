"""Configuration from the environment; every name starts with ``DULY_`` except the customary ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What an operator can set. Defaults are those of the embedded development server."""

    model_config = SettingsConfigDict(env_prefix="DULY_", env_file=None, extra="ignore")

    env: Literal["development", "production"] = "development"
    database_url: str = Field(default="", validation_alias="DATABASE_URL")
    port: int = Field(default=8000, ge=0, le=65535, validation_alias="PORT")
    host: str = "127.0.0.1"
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

    relay_batch: int = Field(default=100, ge=1, le=10_000)
    publish_attempts: int = Field(default=5, ge=1, le=100)

    keep_events_days: int = Field(default=30, ge=1)
    keep_executions_days: int = Field(default=30, ge=1)
    keep_processed_days: int = Field(default=30, ge=1)
    keep_dead_letters_days: int = Field(default=90, ge=1)
    keep_audit_days: int = Field(default=730, ge=1)

    def wants_embedded(self) -> bool:
        """Whether nothing points at a PostgreSQL of the user's own."""
        return not self.database_url and not any(os.environ.get(name) for name in ("PGHOST", "PGSERVICE"))
