"""Refuses requests that are longer than an engine has room for."""

from __future__ import annotations

from siirl_dask.errors import ConfigError, counted
from siirl_dask.rollout.engine import GenerationRequest, check_prompts


def check_room(
    request: GenerationRequest,
    context_length: int | None,
    library: str,
    cure: str,
) -> None:
    """Raise ConfigError for a request whose prompt and response may be longer than
    ``context_length`` tokens, and ValueError for one without a prompt. None: any length.

    ``library`` says who has room for so many, and ``cure`` how to get more, in the message.
    """
    check_prompts([request.prompt])
    length = len(request.prompt)
    max_tokens = request.sampling.max_tokens
    if context_length is not None and length + max_tokens > context_length:
        raise ConfigError(
            f"rollout.max_response_length={max_tokens}: with a prompt of "
            f"{counted(length, 'token')} more than the {context_length} that {library} room for; "
            f"lower it or data.max_prompt_length, or {cure}"
        )
