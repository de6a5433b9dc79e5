"""The answers 401 and 403 with the challenge RFC 6750 wants, in words that repeat nothing from a token."""

from __future__ import annotations

from duly.errors import Forbidden, Unauthenticated

CHALLENGE = "WWW-Authenticate"


def no_credentials() -> Unauthenticated:
    """There was no bearer token at all."""
    error = Unauthenticated("this needs a token: send it as 'Authorization: Bearer ...'")
    error.headers = {CHALLENGE: "Bearer"}
    return error


def invalid_request(reason: str) -> Unauthenticated:
    """The credentials cannot be read as exactly one token."""
    return _unauthenticated("invalid_request", reason)


def invalid_token(reason: str) -> Unauthenticated:
    """There was a token, and it is not valid; the reason is a constant of ours."""
    return _unauthenticated("invalid_token", reason)


def insufficient_scope(detail: str, scope: str) -> Forbidden:
    """The token is valid and does not give this right."""
    error = Forbidden(detail)
    error.headers = {CHALLENGE: f'Bearer error="insufficient_scope", scope="{scope}"'}
    return error


def _unauthenticated(code: str, reason: str) -> Unauthenticated:
    error = Unauthenticated(reason)
    error.headers = {CHALLENGE: f'Bearer error="{code}", error_description="{reason}"'}
    return error
