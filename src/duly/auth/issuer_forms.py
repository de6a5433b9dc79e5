"""What the development issuer reads from forms, and the errors of RFC 6749."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qs

from fastapi import Request
from fastapi.responses import JSONResponse

BODY_LIMIT_BYTES = 16_384
NO_STORE = {"Cache-Control": "no-store", "Pragma": "no-cache"}


class TokenError(Exception):
    """An answer of RFC 6749, section 5.2."""

    def __init__(self, code: str, description: str, *, status: int = 400) -> None:
        super().__init__(description)
        self.code, self.description, self.status = code, description, status

    def response(self) -> JSONResponse:
        """The error as the protocol wants it."""
        challenge = {"WWW-Authenticate": 'Basic realm="development issuer"'} if self.status == 401 else {}
        body = {"error": self.code, "error_description": self.description}
        return JSONResponse(body, status_code=self.status, headers={**NO_STORE, **challenge})


async def read_form(request: Request) -> dict[str, list[str]]:
    """The fields of a form, each with all of its values."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise TokenError("invalid_request", "send application/x-www-form-urlencoded")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_LIMIT_BYTES:
            raise TokenError("invalid_request", "the body is too large", status=413)
    try:
        return parse_qs(body.decode(), keep_blank_values=True, strict_parsing=bool(body), max_num_fields=50)
    except ValueError as error:  # also what is not UTF-8
        raise TokenError("invalid_request", "the body is not a form") from error


def one(form: Mapping[str, list[str]], name: str) -> str:
    """The value of a field that may be given once; empty when it is not given."""
    values = form.get(name, [""])
    if len(values) > 1:
        raise TokenError("invalid_request", f"{name} is given more than once")
    return values[0]
