"""Config groups of the run itself: output, validation and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from siirl_dask.config.checks import at_least, check_location, finite, located
from siirl_dask.errors import ConfigError


class OnNan(StrEnum):
    """Consequence of a loss, a gradient, log-probs, values or advantages that are not finite."""

    stop = "stop"
    """The run ends, and names the rows."""
    skip = "skip"
    """The optimizer step of that mini-batch is left out on all workers."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """``run``: name, output, length and seed."""

    name: str = "run"
    url: str = "runs/${run.name}"
    """Folder of everything that the run writes: a local path or any fsspec URL."""
    steps: int = 100
    """Training steps."""
    seed: int = 0
    """Seed of data order and sampling."""
    lookahead: int = 2
    """Steps that the client submits ahead, so that no worker waits for it."""
    overlap: bool = True
    """Begin to score responses that are finished while others are still generated, where the reward
    function runs in processes of its own (``rewards.processes``) or is async. The rewards are the
    same, bit for bit.
    """
    keep_stages: int | None = None
    """Number of newest steps whose saved rows stay, beyond those that a resume may need. None:
    all."""
    lease: float = 30.0
    """Seconds without a sign of life of this start, after which another one may take the folder
    over."""
    max_restarts: int = 3
    """Times in a row, without a new step in between, that the run is tried again by itself when it
    has lost a worker.
    0: it ends then.
    """
    grace: float = 30.0
    """Seconds that a run which gets SIGTERM has for the steps under way and a last checkpoint.
    0: it ends at once."""
    node_timeout: float | None = None
    """Seconds for which one node on one worker may get nothing done, while it does not wait for
    others; then the step fails, and the message says who waits for whom. None: one and a half times
    ``cluster.stall_timeout``. 0: any time.
    """
    on_nan: OnNan = OnNan.stop
    """Consequence of numbers that are not finite: ``stop`` ends the run; ``skip`` leaves the
    optimizer step of that mini-batch out, up to ``trainer.max_skipped_steps`` times in a row. No
    step is ever taken on them.
    """

    def __post_init__(self) -> None:
        at_least("run", 1, steps=self.steps, lookahead=self.lookahead)
        at_least("run", 0, seed=self.seed, max_restarts=self.max_restarts, grace=self.grace)
        if self.seed >= 2**63:  # a Config made in Python is not coerced
            raise ConfigError(f"run.seed={self.seed}: expected a whole number below 2**63")
        if self.node_timeout is not None:
            at_least("run", 0, node_timeout=self.node_timeout)
        if self.keep_stages is not None:
            at_least("run", 1, keep_stages=self.keep_stages)
        if not 0 < self.lease <= 86400:
            raise ConfigError(
                f"run.lease={self.lease}: expected more than 0 seconds and at most a day"
            )
        if not self.url:
            raise ConfigError("run.url='': expected a folder or an fsspec URL")
        check_location("run.url", self.url)
        # a Config made in Python has no OmegaConf to do it
        self.url = self.url.replace("${run.name}", self.name)
        within = self.url.removeprefix("runs/")
        if within == self.name and not {"", ".", ".."}.isdisjoint(within.split("/")):
            raise ConfigError(
                f"run.name={self.name!r}: expected the name of a folder below runs/; run.url is for "
                "any other place"
            )


@dataclass(kw_only=True, slots=True)
class ValidationConfig:
    """``validation``: datasets, sampling and metrics of validation and test."""

    url: str | None = None
    """Dataset of the validation. None: no validation."""
    every: int = 10
    """Steps between validations; one is run before the first step and one after the last as
    well."""
    test_url: str | None = None
    """Dataset of the test, which is read once, after the last step."""
    n: int = 1
    """Samples per prompt."""
    temperature: float | None = None
    """Temperature of the samples; 0: the most likely response. None: 0 for one sample per
    prompt, 1 for several."""
    top_p: float = 1.0
    k: list[int] = field(default_factory=list)
    """Values of k for pass@k, maj@k and best@k, up to ``n``. Empty: 1 and ``n``."""
    source_column: str | None = None
    """Column with the source of a row, for metrics of each source; a dot leads into a struct."""
    answer_extractor: str | None = None
    """Function of a response, as ``module:function``, that returns the answer in it, for maj@k.
    None: the response."""

    def __post_init__(self) -> None:
        if self.url:
            self.url = located("validation.url", self.url)
        if self.test_url:
            self.test_url = located("validation.test_url", self.test_url)
        at_least("validation", 1, every=self.every, n=self.n)
        if self.temperature is not None:
            at_least("validation", 0, temperature=self.temperature)
            finite("validation", temperature=self.temperature)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"validation.top_p={self.top_p}: expected more than 0 and at most 1")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"validation.n={self.n} with validation.temperature=0: samples that are all the "
                "most likely response "
                "are all the same; expected a temperature above 0, or validation.n=1"
            )
        self.k = sorted({*self.k} or {1, self.n})
        outside = [k for k in self.k if not 1 <= k <= self.n]
        if outside:
            raise ConfigError(
                f"validation.k={self.k}: {outside[0]} of validation.n={self.n} samples; expected 1 "
                "to n"
            )


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """``checkpoint``: when checkpoints are written, and which ones are kept."""

    every: int = 50
    """Steps between checkpoints; one is written after the last step as well. 0 writes none: a run
    that stops cannot resume, and the model is lost when the run ends.
    """
    keep: int = 2
    """Number of newest checkpoints to keep; older ones are removed."""
    keep_best: str | None = None
    """Metric, such as ``validation/reward/mean``, whose best checkpoint is kept as well: the
    highest value wins."""
    asynchronous: bool = True
    """Write while training goes on, from a copy of the state in the host's memory."""

    def __post_init__(self) -> None:
        at_least("checkpoint", 0, every=self.every)
        at_least("checkpoint", 1, keep=self.keep)
        phase, slash, metric = (self.keep_best or "train/x").partition("/")
        if phase not in ("train", "validation") or not slash or not metric:
            raise ConfigError(
                f"checkpoint.keep_best={self.keep_best!r}: expected train/ or validation/ and the "
                "name of a metric, such as validation/reward/mean"
            )
