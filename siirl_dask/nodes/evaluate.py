"""Samples and measures the answers of a validation or an evaluation, with several samples a prompt or several
sources of prompts.

    mean@n      mean reward of all samples
    pass@k      chance that at least one of k samples is right, that is, has a reward of at least 1
    best@k      mean of the highest reward of k samples; only where some rewards are neither 0 nor 1
    maj@k       mean reward of the answer that most of k samples give
    pass@4/gsm8k, ...    the same over the prompts of one source

A number is the mean over prompts of an estimate over the prompt's samples (estimators.py). Samples
without a reward do not count, and a prompt with fewer than k samples does not count for that k. An
episode of several rows is one sample: its reward is the sum of its rows', its response is the last
one's; of several agents each has samples of its own. Workers sum fractions and round once: the same
bits come out on any number of workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.config import RolloutConfig, ValidationConfig
from siirl_dask.context import Context
from siirl_dask.errors import DataError
from siirl_dask.nodes.advantages.estimators import (
    best_at_k,
    majority_at_k,
    mean,
    pass_at_k_estimate,
)
from siirl_dask.nodes.episodes.sequences import (
    EPISODE_COLUMNS,
    comparison_groups,
    reward_sums,
    sequences_of,
)
from siirl_dask.nodes.generate import sample_rows
from siirl_dask.nodes.prompts import MAX_TOKENS
from siirl_dask.nodes.sampling import EARLY_COLUMNS, SAMPLED, greedy_sampling
from siirl_dask.planner import ContractChanges, columns, reads_option
from siirl_dask.rollout import Sampling
from siirl_dask.schema import (
    AGENT,
    ANSWER,
    EPISODE_ID,
    FINISH_REASON,
    GROUP_ID,
    IDENTITY,
    IMAGES,
    PROMPT,
    PROMPT_IDS,
    RESPONSE,
    RESPONSE_IDS,
    RESPONSE_MASK,
    REWARD,
    REWARD_PARTS,
    ROW_ID,
    SEGMENT,
    TURNS,
    TYPES,
    DataType,
    Schema,
    fields,
    make_schema,
    path_steps,
)

_RIGHT = 1.0  # rewards of at least this: all tests passed, the answer and the format right
_MAX_SOURCES = 256  # a column with more values than this is no source
_BEST = "best@"


@dataclass(frozen=True, slots=True)
class ColumnPath:
    """A column of the dataset, or a field of its structs (``schema.path_steps``). Iterating gives
    what it reads, for a contract.
    """

    path: str | None = None
    """None stands for no column."""

    def __iter__(self) -> Iterator[str]:
        if self.path is not None:
            yield self.path

    def texts(self, table: pa.Table) -> list[str | None]:
        """Return each row's value as text, None where there is none. DataError for a path that
        is not in the struct.
        """
        if self.path is None:
            return [None] * table.num_rows
        first, *rest = path_steps(self.path, table.column_names)
        try:
            values = pc.struct_field(table[first], rest) if rest else table[first]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"there is no {self.path!r} in column {first!r} of type {table[first].type}"
            ) from error
        return [None if value is None else str(value) for value in values.to_pylist()]


NO_COLUMN = ColumnPath()


@dataclass(slots=True)
class _MetricSums:
    """The sum of each metric over prompts, and the number of prompts in it."""

    sums: dict[str, tuple[Fraction, int]] = field(default_factory=dict)
    binary: bool = True
    """True while all rewards are 0 or 1."""

    def add(self, name: str, value: Fraction, count: int = 1) -> None:
        """Add the sum ``value`` of ``count`` prompts."""
        total, prompts = self.sums.get(name, (Fraction(0), 0))
        self.sums[name] = (total + value, prompts + count)

    def merge(self, packed: bytes) -> None:
        """Add another worker's tally."""
        sums, binary = json.loads(packed)
        self.binary &= binary
        for name, (total, count) in sums.items():
            self.add(name, Fraction(total), count)

    def pack(self) -> bytes:
        """Return the tally as bytes for ``merge``."""
        sums = {name: [str(total), count] for name, (total, count) in self.sums.items()}
        return json.dumps([sums, self.binary]).encode()

    def check(self, source: ColumnPath) -> None:
        """Raise DataError when ``source`` has more values than a column of sources can have."""
        sources = {name.partition("/")[2] for name in self.sums} - {""}
        if len(sources) > _MAX_SOURCES:
            raise DataError(
                f"column {source.path!r} has {len(sources)} values or more: expected at most "
                f"{_MAX_SOURCES} sources"
            )

    def values(self) -> dict[str, float]:
        """Return the mean of each metric, without best@k where all rewards are 0 or 1: there it
        equals pass@k.
        """
        means: dict[str, float] = {}
        for name, (total, count) in self.sums.items():
            if not self.binary or not name.startswith(_BEST):
                means[name] = float(total / count)
        return means


def _check_options(
    *,
    n: int,
    k: tuple[int, ...],
    extract: Callable[[str], str | None] | None = None,
    **others: object,
) -> None:
    for size in k:
        if not 1 <= size <= n:
            raise ValueError(f"k={list(k)}: {size} of n={n} samples")
    if extract is None:
        return
    answer = extract("")
    if not isinstance(answer, str | None):
        raise ValueError(f"extract gave {answer!r}: expected a text or None")


@columns(
    reads=[PROMPT_IDS],
    optional=[MAX_TOKENS],
    if_written=[IMAGES],
    writes=SAMPLED,
    expand="validation.n",
    groups="kept",
    early=EARLY_COLUMNS,
)
def generate_answers(
    ctx: Context,
    table: pa.Table,
    *,
    rollout: RolloutConfig,
    validation: ValidationConfig,
) -> pa.Table:
    """Sample ``validation.n`` responses to each prompt as ``validation`` says, numbered as those
    of ``generate``.
    """
    return sample_rows(ctx, table, [validation_sampling(rollout, validation)] * validation.n)


def validation_sampling(rollout: RolloutConfig, validation: ValidationConfig) -> Sampling:
    """Return the sampling parameters of ``generate_answers``; the default temperature is 0 for
    one sample, else 1.
    """
    temperature = validation.temperature
    if temperature is None:
        temperature = 0.0 if validation.n == 1 else 1.0
    return replace(greedy_sampling(rollout), temperature=temperature, top_p=validation.top_p)


@columns(
    reads=[GROUP_ID, REWARD, RESPONSE],
    optional=EPISODE_COLUMNS,
    depends_on_options=reads_option("source"),
    trial=_check_options,
)
def measure_answers(
    ctx: Context,
    table: pa.Table,
    *,
    n: int,
    k: tuple[int, ...],
    source: ColumnPath = NO_COLUMN,
    extract: Callable[[str], str | None] | None = None,
    alone: bool = False,
) -> pa.Table:
    """Log the metrics above for ``n`` samples a prompt. The node needs complete groups:
    rows=GROUPED.

    maj@k counts ``extract(response)``; without ``extract``, and where it returns None, the response
    without surrounding white space. With one sample and no source nothing is logged unless
    ``alone``: ``reward/mean`` is the same number.
    """
    if n == 1 and source.path is None and not alone:
        return table
    own = _tally(table, n, k, source, extract)
    own.check(source)  # before it is sent to all workers: a column of prompts would be large
    tally = _MetricSums()
    for packed in ctx.all_gather(own.pack()):
        tally.merge(packed)
    tally.check(source)
    if ctx.rank.rank == 0:  # all workers know the same
        for name, value in tally.values().items():
            ctx.log(name, value)
    return table


def _tally(
    table: pa.Table,
    n: int,
    k: Sequence[int],
    source: ColumnPath,
    extract: Callable[[str], str | None] | None,
) -> _MetricSums:
    """Return the metrics of this worker's prompts. DataError for a source that cannot be
    printed.
    """
    tally = _MetricSums()
    prompts: dict[int, _Prompt] = {}
    for group, reward, response, name in _samples(table, source):
        if name is not None and not (name and name.isprintable()):
            raise DataError(
                f"source {name!r} ({source.path}) of prompt {group}: expected text that can be "
                "printed"
            )
        prompt = prompts.setdefault(group, _Prompt(name))
        if reward is None:
            continue
        answer = None
        if extract is not None:
            answer = extract(response)
        prompt.answers.append(answer or response.strip())
        prompt.rewards.append(reward)
        tally.binary &= reward in (0.0, 1.0)
    for prompt in prompts.values():
        for metric, value in _estimates(prompt, n, k).items():
            tally.add(metric, Fraction(value))
            if prompt.source is not None:
                tally.add(f"{metric}/{prompt.source}", Fraction(value))
    return tally


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The samples of one prompt that have a reward."""

    source: str | None
    answers: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def _samples(
    table: pa.Table, source: ColumnPath
) -> Iterator[tuple[int, float | None, str, str | None]]:
    """Yield group, reward, response and source of each sample: a row, or an episode."""
    sequences = sequences_of(table)
    groups = comparison_groups(table).tolist()
    responses = table[RESPONSE].to_pylist()
    sources = source.texts(table)
    rewards = reward_sums(sequences, table[REWARD].to_pylist())
    for reward, rows in zip(rewards, sequences.rows(), strict=True):
        last = rows[-1]
        yield groups[last], reward, responses[last], sources[last]


def _estimates(prompt: _Prompt, n: int, k: Sequence[int]) -> Mapping[str, float]:
    """Return the estimates of one prompt, for each k that it has enough samples for."""
    rewards = prompt.rewards
    count = len(rewards)
    right = sum(reward >= _RIGHT for reward in rewards)
    sizes = [size for size in k if size <= count]
    several = [size for size in sizes if size > 1]
    estimates: dict[str, float] = {}
    if rewards:
        estimates[f"mean@{n}"] = mean(rewards)
    for size in sizes:
        estimates[f"pass@{size}"] = pass_at_k_estimate(count, right, size)
    for size in several:
        estimates[f"{_BEST}{size}"] = best_at_k(rewards, size)
    for size in several:
        estimates[f"maj@{size}"] = majority_at_k(prompt.answers, rewards, size)
    return estimates


SAMPLE = "sample"
SOURCE = "source"
_SAMPLE_COLUMNS = (RESPONSE, FINISH_REASON, REWARD, REWARD_PARTS)
_EPISODE_COLUMNS = (EPISODE_ID, SEGMENT, TURNS, PROMPT_IDS, RESPONSE_IDS, RESPONSE_MASK)
"""Columns that show which tokens of an episode the policy and the environment wrote."""


def eval_table_schema(
    prompt: DataType,
    answer: DataType,
    *,
    episodes: bool = False,
    agents: bool = False,
) -> Schema:
    """Return the columns that ``eval_table`` writes, for its node: prompts and answers have the
    dataset's types.

    ``episodes`` says whether rows are those of episodes, ``agents`` whether these have several.
    """
    types: dict[str, DataType] = {
        SAMPLE: pa.int64(),
        SOURCE: pa.large_string(),
        PROMPT: prompt,
        ANSWER: answer,
    }
    types |= {name: TYPES[name] for name in _SAMPLE_COLUMNS}
    if episodes:
        types |= {name: TYPES[name] for name in _EPISODE_COLUMNS}
    if agents:
        types |= fields(AGENT)
    return make_schema(types)


def _reads_of_eval_table(
    *, source: ColumnPath = NO_COLUMN, episodes: bool = False, **options: object
) -> ContractChanges:
    if episodes:
        return ContractChanges(reads=[*source, *_EPISODE_COLUMNS], optional=[AGENT])
    return ContractChanges(reads=[*source])


@columns(
    reads=[PROMPT, ANSWER, *_SAMPLE_COLUMNS],
    depends_on_options=_reads_of_eval_table,
    passes=False,
)
def eval_table(
    ctx: Context,
    table: pa.Table,
    *,
    n: int,
    source: ColumnPath = NO_COLUMN,
    episodes: bool = False,
) -> pa.Table:
    """Return a table to read: prompt, answer, response, reward, source, and the sample's number
    from 0 to ``n - 1``.

    With ``episodes`` it also has the columns of episodes. No column depends on which worker made
    it.
    """
    names = [*IDENTITY, PROMPT, ANSWER, *_SAMPLE_COLUMNS]
    if episodes:
        names += _EPISODE_COLUMNS
    shown = {name: table[name] for name in names}
    if episodes and AGENT in table.column_names:
        shown[AGENT] = table[AGENT]
    sample_ids = table[EPISODE_ID if episodes else ROW_ID].to_numpy()
    shown[SAMPLE] = pa.array(sample_ids % n, pa.int64())
    shown[SOURCE] = pa.array(source.texts(table), pa.large_string())
    return pa.table(shown)
