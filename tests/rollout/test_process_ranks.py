"""Engines of two ranks with a process for each: rows as those of ranks in the workers' processes, and
ranks that are killed, crash or raise.
"""

import os
import signal
import time
from functools import partial
from pathlib import Path

import msgpack
import pytest

from siirl_dask.config import Dtype, ModelConfig, RolloutConfig
from siirl_dask.context import Device
from siirl_dask.errors import ConfigError, PeerError, RunError
from siirl_dask.rollout import LocalQueue, build_engine
from siirl_dask.rollout.process_engine.ranks import CallEnd, _read_end
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import run_ranks
from tests.rollout.test_process_engine import alive, of_group, other_weights, responses, rows

RANKS = "tests.rollout.crashing_engine:RANKS"


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        *map(msgpack.packb, (None, [], [0], [99, True, 1, None], [0, 1, 1, None])),
        *map(msgpack.packb, ([0, True, "1", None], [0, True, 1, ["RunError"]], [0, True, 1, "no"])),
    ],
)
def test_a_rank_that_says_anything_but_how_its_call_has_ended_is_refused(message):
    with pytest.raises(PeerError, match=r"rank 1 of the engine sent .*: expected how its call"):
        _read_end(message, 1, 2)


def test_what_a_call_has_raised_on_another_rank_is_raised_with_that_ranks_number():
    message = msgpack.packb([CallEnd.FAILED, False, 3, ["ConfigError", "too small"]])
    end, delivered, version, error = _read_end(message, 1, 2)
    assert (end, delivered, version) == (CallEnd.FAILED, False, 3)
    assert isinstance(error, ConfigError)
    assert str(error) == "rank 1 of 2: too small"


def engine_of(folder, rank, scratch, *, process=True, at=0, **crash):
    """Build a rank of an engine that crashes at a token where its file ``marker`` is there, one for each."""
    options = {
        "log": str(scratch / f"log-{rank.rank}"),
        "marker": str(scratch / f"marker-{rank.rank}"),
    }
    options |= {"at": at, "stays": False, "raises": False, **crash}
    rollout = RolloutConfig(
        engine=RANKS,
        process=process,
        tensor_parallel_size=2,
        engine_options=options,
        max_rows=3,
    )
    model = ModelConfig(path=str(folder), dtype=Dtype.float32)
    return build_engine(Device(f"w{rank.rank}"), rank, model=model, rollout=rollout)


def own_rows(rank, tokens=8):
    """The requests of a rank: the first has more than the other."""
    return rows(16, tokens)[rank.rank :: 2] if rank.rank else rows(22, tokens)[::2]


def with_kills(rank, folder):
    """Sample before and after kills of either rank, and return what did not hold."""
    scratch = Path(folder) / "scratch"
    model = Path(folder) / "model"
    requests = own_rows(rank)
    weights = other_weights(model)
    own = engine_of(model, rank, scratch, process=False)
    expected = [responses(own, requests)]
    own.load_weights(weights.items(), 3)
    expected.append(responses(own, requests))
    own.close()
    engine = engine_of(model, rank, scratch)
    processes = of_group(engine.pid)
    held = {"a process for each rank": responses(engine, requests) == expected[0]}
    if rank.rank == 0:
        os.kill(engine.pid, signal.SIGKILL)
    engine.load_weights(weights.items(), 3)
    held["killed before weights came"] = responses(engine, requests) == expected[1]
    processes += of_group(engine.pid)
    delivered = []

    def note(number, _):
        delivered.append(number)
        if rank.rank == 1 and len(delivered) == 4:
            os.kill(engine.pid, signal.SIGKILL)

    # rows of other batches than before differ in the last bits of their log-probs here
    given = responses(engine, requests, note)
    tokens = [sample.token_ids for sample in given]
    held["killed while it generates"] = tokens == [sample.token_ids for sample in expected[1]]
    held["each is delivered once"] = sorted(delivered) == list(range(len(requests)))
    held["nothing to generate"] = responses(engine, []) == []
    held["version"] = engine.version == 3
    processes += of_group(engine.pid)
    rank.side_group.barrier().wait()
    engine.close()
    held["nothing is left"] = not alive(processes)
    return [what for what, was_so in held.items() if not was_so]


def test_rows_of_two_ranks_stay_the_same_when_the_process_of_one_is_killed(tmp_path):
    tiny_model(tmp_path / "model", seed=1)
    (tmp_path / "scratch").mkdir()
    assert run_ranks(2, partial(with_kills, folder=str(tmp_path)), tmp_path) == [[], []]


class Arriving:
    """Weights of version 3 that arrive when the engine has asked so often."""

    def __init__(self, engine, weights, after):
        self.engine = engine
        self.weights = weights
        self.left = after
        self.loaded = 0

    def arrived(self):
        self.left -= 1
        return self.left < 0 and not self.loaded

    def load(self):
        self.loaded += 1
        self.engine.load_weights(self.weights.items(), 3)


def in_flight(engine, requests, weights, after):
    """Return the responses of an engine, and how often it has loaded weights meanwhile."""
    queue = LocalQueue(requests)
    arriving = Arriving(engine, weights, after)
    engine.serve_in_flight(queue, arriving)
    return queue.results(), arriving.loaded


def with_a_kill_as_weights_are_loaded(rank, folder):
    """Kill the second rank's process when the first one has loaded new weights in flight and it has not.
    Return what did not hold.
    """
    scratch = Path(folder) / "scratch"
    model = Path(folder) / "model"
    requests = own_rows(rank)
    weights = other_weights(model)
    own = engine_of(model, rank, scratch, process=False)
    whole, loads = in_flight(own, requests, weights, 4 + 3 * rank.rank)
    held = {"loaded once": loads == 1}
    own.load_weights(weights.items(), 3)
    later = responses(own, requests)
    own.close()
    if rank.rank == 1:
        (scratch / "loaded").unlink()
        (scratch / "marker-1").touch()
    engine = engine_of(model, rank, scratch)
    first = engine.pid
    again, loads = in_flight(engine, requests, weights, 4 + 3 * rank.rank)
    held["loaded once, also where it was behind"] = loads == 1
    held["another process"] = engine.pid != first
    held["version"] = engine.version == 3
    # the first rows of each rank were under way: they begin again with the newest weights
    tokens = [sample.token_ids for sample in again]
    held["rows of the new weights"] = tokens == [sample.token_ids for sample in later]
    held["versions"] = {tuple(sample.versions) for sample in again} == {(3,) * 8}
    held["some are otherwise"] = whole[0].versions[:7] == [0] * 7
    calm, _ = in_flight(engine, requests, weights, 10**6)
    held["the next call"] = [sample.token_ids for sample in calm] == tokens
    engine.close()
    return [what for what, was_so in held.items() if not was_so]


def test_ranks_have_the_same_weights_after_one_was_killed_before_it_loaded_newer_ones(tmp_path):
    """A mix of two versions would sample rows of neither."""
    tiny_model(tmp_path / "model", seed=1)
    (tmp_path / "scratch").mkdir()
    found = run_ranks(2, partial(with_a_kill_as_weights_are_loaded, folder=str(tmp_path)), tmp_path)
    assert found == [[], []]


def with_a_start_that_fails_on_one(rank, folder, start):
    """Return what each worker says of a start that fails on the second, and the seconds until then."""
    began = time.monotonic()
    with pytest.raises(RunError) as ended:
        engine_of(Path(folder) / "model", rank, Path(folder), start=start)
    return [str(ended.value), time.monotonic() - began]


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ("raises", "the engine raised MemoryError in its process: the second device has no memory"),
        ("killed", "was ended by SIGKILL, and said nothing\nIt was building the engine: look for"),
    ],
)
def test_a_start_that_fails_on_one_rank_ends_that_of_all_with_its_reason(tmp_path, start, why):
    """The first one waits for it, or fails since it is gone: of that nobody wants to hear."""
    tiny_model(tmp_path / "model", seed=1)
    fails = partial(with_a_start_that_fails_on_one, folder=str(tmp_path), start=start)
    first, other = run_ranks(2, fails, tmp_path)
    assert why in first[0]
    assert first[0].startswith("rank 1 of 2: ")
    assert why in other[0]
    assert max(first[1], other[1]) < 120, "collectives give up after 180"


def with_a_bug_of_one(rank, folder):
    """Let the engine raise on one rank, then on the other. Return what each worker says, and how many
    responses it gets in its next call, each time.
    """
    scratch = Path(folder) / "scratch"
    engine = engine_of(Path(folder) / "model", rank, scratch, at=5, raises=True)
    found = []
    for buggy in (0, 1):
        if rank.rank == buggy:
            (scratch / f"marker-{buggy}").touch()
        with pytest.raises(RunError) as ended:
            responses(engine, own_rows(rank))
        again = responses(engine, own_rows(rank))
        found.append([str(ended.value), len(again)])
    engine.close()
    return found


@pytest.mark.slow
def test_a_bug_in_one_rank_ends_the_call_on_both_with_its_words_and_is_no_loss(tmp_path):
    """The other one's collective fails of it, of which nobody wants to hear."""
    tiny_model(tmp_path / "model", seed=1)
    (tmp_path / "scratch").mkdir()
    found = run_ranks(2, partial(with_a_bug_of_one, folder=str(tmp_path)), tmp_path)
    for buggy in (0, 1):
        for rank in (0, 1):
            said, again = found[rank][buggy]
            assert "the engine raised KeyError in its process" in said
            assert said.startswith(f"rank {buggy} of 2: ") == (rank != buggy)
            assert again == (11, 8)[rank]


def with_crashes(rank, folder):
    """Let the second rank's process crash each time without a response, while the first one's stands
    still, as one that waits for another on a device does; return what is said.
    """
    scratch = Path(folder) / "scratch"
    (scratch / f"marker-{rank.rank}").touch()
    hangs = rank.rank == 0
    engine = engine_of(Path(folder) / "model", rank, scratch, at=5, stays=True, hangs=hangs)
    with pytest.raises(RunError) as ended:
        responses(engine, own_rows(rank))
    engine.close()
    return str(ended.value)


@pytest.mark.slow
def test_ranks_that_are_lost_twice_without_a_response_end_the_run_on_all_workers(tmp_path):
    tiny_model(tmp_path / "model", seed=1)
    (tmp_path / "scratch").mkdir()
    first, other = run_ranks(2, partial(with_crashes, folder=str(tmp_path)), tmp_path)
    assert "was ended by its worker" in first
    assert "was ended by SIGKILL; the last that it said:\nthe engine is about to crash" in other
    for said in (first, other):
        assert "2 processes in a row have ended so" in said
