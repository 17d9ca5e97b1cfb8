"""Answers of the endpoint to requests that it does not serve, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from siirl_dask.errors import did_you_mean


class Refusal(Exception):
    """A request is not served: the HTTP status, and why."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}
        }


def unauthorized() -> Refusal:
    """Return the refusal of a request whose token is none of an episode that is under way."""
    return Refusal(
        401,
        "the bearer token is none of an episode that is under way: pass on the api_key that the "
        "agent was called with",
        code="invalid_api_key",
    )


def unknown_model(name: object, known: str) -> Refusal:
    """Return the refusal of another model's name."""
    near = did_you_mean(str(name), [known])
    message = (
        f"the model {str(name)[:100]!r} does not exist: this endpoint serves {known!r} "
        f"(endpoint.model){near}"
    )
    return Refusal(404, message, field="model", code="model_not_found")


def too_long(message: str) -> Refusal:
    """Return the refusal of a conversation that has no room left, as OpenAI's servers word it
    for their clients.
    """
    return Refusal(400, message, field="messages", code="context_length_exceeded")


def over_limit(message: str) -> Refusal:
    """Return the refusal of a request beyond a bound of its episode. It is no 429: to try again
    does not help.
    """
    return Refusal(403, message, code="episode_limit")


def invalid(field: str, value: object, expected: str) -> Refusal:
    """Return the refusal of a field's value."""
    return Refusal(
        400, f"{field}={value!r:.100}: expected {expected}", field=field, code="invalid_value"
    )


def unsupported(field: str, value: object, reason: str, *, may_ignore: bool = True) -> Refusal:
    """Return the refusal of a field that asks for what the endpoint cannot do."""
    hint = "; leave it out"
    if may_ignore:
        hint += f", or let it be left unread: endpoint.ignore=[{field}]"
    return Refusal(
        400, f"{field}={value!r:.100}: {reason}{hint}", field=field, code="unsupported_value"
    )
