"""Puts the HTTP layer around a FastAPI application, ours or anybody's."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from duly.db import Database
from duly.http.middleware import DEFAULT_BODY_BYTES, DEFAULT_BODY_SECONDS, Boundary
from duly.http.problems import INVALID_STATUS, PROBLEM_SCHEMA, describe, install_problems


def install(
    api: FastAPI,
    db: Database,
    *,
    body_bytes: int = DEFAULT_BODY_BYTES,
    body_seconds: float = DEFAULT_BODY_SECONDS,
) -> None:
    """Problems, correlation, limits, metrics and traces for every route; transactions for those of a ``Router``."""
    api.state.db = db
    install_problems(api)
    api.add_middleware(Boundary, body_bytes=body_bytes, body_seconds=body_seconds)
    make = api.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Problem"] = PROBLEM_SCHEMA
        if schemas.pop("HTTPValidationError", None):
            schemas.pop("ValidationError", None)
            _say_problem(document)
        return document

    api.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way of extending the document


def _say_problem(document: dict[str, Any]) -> None:
    """Routes of others are documented by FastAPI with its own error; what they answer is a problem, too."""
    for path in document["paths"].values():
        for operation in path.values():
            answers = operation.get("responses", {}) if isinstance(operation, dict) else {}
            if INVALID_STATUS in operation:
                answers.pop("422", None)  # FastAPI adds it to every route that takes anything
            elif "HTTPValidationError" in str(answers.get("422")):
                answers["422"] = describe(422)[422]
