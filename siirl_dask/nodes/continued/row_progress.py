"""The progress of a row that may go on in later steps: a response, or the one row of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NOT_SAMPLED = -1
"""Version of the weights of a token that the policy did not sample."""


@dataclass(frozen=True, slots=True)
class RowProgress:
    """A row as far as it is sampled."""

    ended: bool
    response: list[int]
    versions: list[int]
    """Version of the weights of each token; ``NOT_SAMPLED`` for the environment's."""
    logprobs: list[float]
    """The row's own list: a rule may replace its numbers."""

    def sampled_versions(self) -> Sequence[int]:
        """Return the version of the weights of each token that the policy has sampled."""
        return [version for version in self.versions if version != NOT_SAMPLED]
