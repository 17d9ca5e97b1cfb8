"""A response that is generated in several parts, each with weights of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from siirl_dask.rollout.engine import FinishReason, Generation, GenerationRequest


@dataclass(slots=True)
class ContinuedRow:
    """The request of a response, and what has been sampled of it."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token."""
    reason: FinishReason | None = None
    """None while it goes on."""

    def rest(self) -> GenerationRequest:
        """Return the request of what is left of the response."""
        request = self.request
        sampling = request.sampling
        return replace(
            request,
            prompt=[*request.prompt, *self.tokens],
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(self.tokens)),
            begun=request.begun + len(self.tokens),
        )

    def add(self, generation: Generation, version: int) -> None:
        """Append tokens that weights of ``version`` have sampled; the response goes on unless they
        end with an end token or reach its limit.
        """
        self.tokens += generation.token_ids
        self.logprobs += generation.logprobs
        self.versions += [version] * len(generation.token_ids)
        at_limit = len(self.tokens) == self.request.sampling.max_tokens
        if generation.finish_reason is FinishReason.STOP or at_limit:
            self.reason = generation.finish_reason

    def whole(self) -> Generation:
        """Return the response, which has ended."""
        assert self.reason is not None
        return Generation(self.tokens, self.logprobs, self.reason, versions=self.versions)
