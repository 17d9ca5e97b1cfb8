"""A response that is generated in several parts, each with weights of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from siirl_dask.rollout.engine import FinishReason, Generation, GenerationRequest


@dataclass(slots=True)
class ContinuedRow:
    """The request of a response, and what has been sampled of it."""

    request: GenerationRequest
    """The request of its first part."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token."""
    finish_reason: FinishReason | None = None
    """None while it goes on."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def rest(self, budget: int | None = None) -> GenerationRequest:
        """Return the request of the next part: at most ``budget`` tokens; None means all that the
        limit allows.
        """
        request = self.request
        max_tokens = request.sampling.max_tokens - len(self.tokens)
        if budget is not None:
            max_tokens = min(budget, max_tokens)
        return replace(
            request,
            prompt=[*request.prompt, *self.tokens],
            sampling=replace(request.sampling, max_tokens=max_tokens),
            begun=request.begun + len(self.tokens),
        )

    def add(self, generation: Generation, version: int) -> None:
        """Append a part, sampled with weights of ``version`` unless the engine has recorded others;
        the response goes on unless the part ends with an end token or reaches the limit.
        """
        self.tokens += generation.token_ids
        self.logprobs += generation.logprobs
        self.versions += generation.versions_or(version)
        at_limit = len(self.tokens) == self.request.sampling.max_tokens
        if generation.finish_reason is FinishReason.STOP or at_limit:
            self.finish_reason = generation.finish_reason

    def whole(self) -> Generation:
        """Return the response, which has ended."""
        assert self.finish_reason is not None
        return Generation(self.tokens, self.logprobs, self.finish_reason, versions=self.versions)
