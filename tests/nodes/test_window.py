"""Tests of steps that take the first groups that are whole: none is lost, none is trained twice or
too old, and a run that repeats another's ledger makes the same rows.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from siirl_storage import commit_parts, stage_part

from siirl_dask.config import EnvironmentsConfig, RolloutConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import ConfigError, DataError
from siirl_dask.nodes import play
from siirl_dask.nodes.continued.window import GroupProgress, choose_groups, groups_left
from siirl_dask.nodes.episodes.play import _check_partial_rollout
from siirl_dask.nodes.episodes.run_agents import _check_options
from siirl_dask.planner.contract import contract_of
from siirl_dask.rollout import FinishReason, Generation
from siirl_dask.tables.stored_rows import step_folder
from tests.nodes.test_play import END, Drawing, table
from tests.nodes.worlds import Echo, ThreadWorld

LENGTH, N = 24, 2

progress = st.builds(
    GroupProgress,
    group=st.integers(0, 10**6),
    whole_at=st.none() | st.integers(0, 100),
    oldest_version=st.none() | st.integers(0, 9),
)


@given(st.lists(progress, unique_by=lambda one: one.group), st.integers(-2, 12), st.integers(0, 4))
def test_the_oldest_whole_groups_are_taken_and_what_is_too_old_for_the_next_step_is_dropped(
    groups, count, staleness
):
    choice = choose_groups(groups, count, trained_next=9, max_staleness=staleness)
    whole = [group for group in groups if group.whole_at is not None]
    assert len(choice.taken) == min(max(count, 0), len(whole))
    assert choice.taken <= {group.group for group in whole}

    def age(group):
        return 0 if group.oldest_version is None else 9 - group.oldest_version

    taken = [group for group in whole if group.group in choice.taken]
    left = [group for group in whole if group.group not in choice.taken]
    for one in taken:
        for other in left:
            assert age(one) > age(other) or (
                age(one) == age(other) and one.whole_at <= other.whole_at
            )
    too_old = {group.group for group in groups if age(group) > staleness}
    assert choice.dropped == too_old - choice.taken


@given(st.integers(0, 40), st.integers(1, 9))
def test_workers_share_the_window(window, workers):
    shares = [groups_left(window, rank, workers) for rank in range(workers)]
    assert sum(shares) == window
    assert max(shares) - min(shares) <= 1


class ByVersion(Drawing):
    """An engine whose tokens depend on the version of its weights as well."""

    def turn(self, asked):
        tokens = []
        for place in range(asked.begun, asked.begun + asked.sampling.max_tokens):
            draw = hash((asked.seed, place, self.version))
            tokens.append(END if draw % 3 == 0 else ord("0") + draw % 10)
            if tokens[-1] == END:
                return Generation(tokens, [-float(draw % 7)] * len(tokens), FinishReason.STOP)
        return Generation(tokens, [-1.0] * len(tokens), FinishReason.LENGTH)


class Players:
    """A worker that plays some prompts in each step, and commits the rows that it makes."""

    def __init__(self, folder, *, window, staleness=2, ledger=None, world=None, state=None, n=N):
        self.engine, self.state = ByVersion(version=0), {} if state is None else state
        self.folder = folder
        self.world = world or ThreadWorld(Echo, delay=0.004)
        self.metrics = []
        self.options = {
            "rollout": RolloutConfig(
                n=n,
                max_response_length=LENGTH,
                window=window,
                max_staleness=staleness,
                steps_ahead=0,
                ledger=ledger,
            ),
            "environments": EnvironmentsConfig(turns=5, turn_tokens=3),
            "max_prompt_length": 30,
        }

    def context(self, step, *, drain=False):
        how = {
            "rank": Rank(),
            "device": Device("w"),
            "resource": self.engine,
            "resources": {"environments": self.world},
        }
        return Context(step=step, run_seed=0, state=self.state, drain=drain, **how)

    def play(self, step, answers, *, drain=False):
        prompts = [f"{step}.{at}" for at in range(len(answers))]
        ctx = self.context(step, drain=drain)
        self.engine.version = step - 1
        rows = play(ctx, table(answers, prompts), **self.options)
        folder = step_folder(str(self.folder), "rollouts", step)
        commit_parts(folder, 1, [stage_part(folder, 1, 0, rows)])
        self.metrics.append({name: metric.value for name, metric in ctx.metrics.items()})
        return rows

    def steps(self, steps):
        last = len(steps)
        return [self.play(at, answers, drain=at == last) for at, answers in enumerate(steps, 1)]


turns = st.integers(1, 6).map(str)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 5).flatmap(
        lambda size: st.tuples(
            st.lists(st.lists(turns, min_size=size, max_size=size), min_size=1, max_size=4),
            st.integers(1, size - 1),
        )
    ),
    st.integers(1, 2),
)
def test_no_group_is_lost_or_trained_twice_or_too_old_and_a_ledger_gives_the_same_rows(
    tmp_path_factory, given_, staleness
):
    steps, window = given_
    folder = tmp_path_factory.mktemp("run")
    first = Players(folder / "first", window=window, staleness=staleness)
    made = first.steps(steps)
    counts = [rows.num_rows // N for rows in made]
    size = len(steps[0])
    if len(steps) > 1:
        assert counts == [size - window, *[size] * (len(steps) - 2), size + window]
    prompts = Counter(prompt for rows in made for prompt in rows["prompt"].to_pylist())
    assert prompts == {f"{step}.{at}": N for step in range(1, len(steps) + 1) for at in range(size)}
    for step, rows in enumerate(made, 1):
        assert set(Counter(rows["group_id"].to_pylist()).values()) == {N}
        ages = [step - 1 - version for version in rows["weights_version"].to_pylist()]
        assert max(ages) <= staleness
    assert first.world.opened == first.world.closed
    assert not first.state

    ledger = str(folder / "first" / "rollouts")
    slower = ThreadWorld(Echo, delay=0.01, threads=3)
    again = Players(
        folder / "again", window=window, staleness=staleness, ledger=ledger, world=slower
    )
    for step, (expected, got) in enumerate(zip(made, again.steps(steps), strict=True), 1):
        assert got.equals(expected), step
    assert slower.opened == slower.closed


class Held(Echo):
    """Waits, in the episodes of one prompt, until the test lets it go on."""

    gate = threading.Event()
    held = "1.0"

    def reset(self, row, seed):
        super().reset(row, seed)
        self.waits = row["prompt"] == self.held

    def step(self, action):
        if self.waits and self.turns == 1:
            self.gate.wait(150)
        return super().step(action)


def test_a_group_that_waits_is_passed_by_dropped_when_too_old_and_trained_in_the_drain(tmp_path):
    Held.gate = threading.Event()
    players = Players(tmp_path, window=1, staleness=1, world=ThreadWorld(Held))
    rows = [players.play(step, ["3", "2", "3"]) for step in (1, 2, 3, 4)]
    assert [table.num_rows for table in rows] == [4, 6, 6, 6]  # nobody waited for the gate
    assert "1.0" not in {prompt for table in rows for prompt in table["prompt"].to_pylist()}
    # begun at weights 0 and again at weights 2, and too old for the steps after the second and
    # fourth
    assert [metrics["rollout/dropped_groups"] for metrics in players.metrics] == [0, 1, 0, 1]
    Held.gate.set()
    drained = players.play(5, ["1", "1", "1"], drain=True)
    assert drained.num_rows == 8
    versions = drained["weights_version"].to_pylist()
    of_prompt = dict(zip(drained["prompt"].to_pylist(), versions, strict=True))
    assert of_prompt["1.0"] == 4
    assert players.world.opened == players.world.closed
    again = Players(
        tmp_path / "again", window=1, staleness=1, ledger=str(tmp_path / "rollouts"),
        world=ThreadWorld(Echo),
    )  # fmt: skip
    for expected, step in zip([*rows, drained], range(1, 6), strict=True):
        answers = ["1", "1", "1"] if step == 5 else ["3", "2", "3"]
        assert again.play(step, answers, drain=step == 5).equals(expected), step
    assert again.world.opened == again.world.closed
    assert sum(metrics["rollout/dropped_groups"] for metrics in again.metrics) == 0


class AsksOn(ByVersion):
    """A rank of an engine, which asks for turns as long as other ranks have some."""

    def serve(self, queue):
        super().serve(queue)
        Held.gate.set()
        time.sleep(0.2)
        assert queue.next(4, wait=False) == []
        assert queue.ended()


@pytest.mark.timeout(60)
def test_an_answer_that_comes_after_the_step_is_over_is_not_lost(tmp_path):
    Held.gate = threading.Event()
    players = Players(tmp_path, window=1, world=ThreadWorld(Held))
    players.engine = AsksOn(version=0)
    assert players.play(1, ["3", "2", "1"]).num_rows == 2 * N
    drained = players.play(2, ["1", "1", "1"], drain=True)
    assert drained["prompt"].to_pylist().count("1.0") == N


def test_after_a_restart_kept_groups_begin_again_and_the_ledger_of_both_parts_is_repeated(tmp_path):
    steps = [["5", "1", "6", "4"], ["2", "5", "3", "6"], ["1", "4", "5", "2"], ["3", "3", "6", "1"]]
    first = Players(tmp_path / "run", window=2)
    made = [first.play(step, steps[step - 1]) for step in (1, 2)]
    carries = contract_of(partial(play, **first.options)).carries
    packed = carries.pack(first.context(2), **first.options)
    assert packed.num_rows == 2 * N
    later = Players(tmp_path / "run", window=2)
    carries.unpack(later.context(0), packed, **later.options)
    made += [later.play(3, steps[2]), later.play(4, steps[3], drain=True)]
    prompts = Counter(prompt for rows in made for prompt in rows["prompt"].to_pylist())
    assert prompts == {f"{step}.{at}": N for step in range(1, 5) for at in range(4)}
    begun = [
        (step, version)
        for step, rows in enumerate(made, 1)
        for prompt, version in zip(
            rows["prompt"].to_pylist(), rows["weights_version"].to_pylist(), strict=True
        )
        if step > 2 and prompt[0] in "12"
    ]
    assert begun
    assert all(version >= 2 for _, version in begun)  # of weights after the restart alone
    ledger = str(tmp_path / "run" / "rollouts")
    again = Players(tmp_path / "again", window=2, ledger=ledger)
    for step, (expected, got) in enumerate(zip(made, again.steps(steps), strict=True), 1):
        assert got.equals(expected), step


def test_a_repetition_that_was_cut_short_has_no_old_weights_and_says_so(tmp_path):
    Held.gate = threading.Event()
    first = Players(tmp_path / "run", window=1, world=ThreadWorld(Held))
    steps = [["4", "2", "3"], ["3", "1", "2"]]
    first.play(1, steps[0])
    Held.gate.set()
    rows = first.play(2, steps[1], drain=True).to_pylist()
    held = [row for row in rows if row["prompt"] == "1.0"]
    assert len(held) == N
    assert all({0, 1} < {*row["token_versions"]} for row in held)
    given_ = {"window": 1, "ledger": str(tmp_path / "run" / "rollouts")}
    cut = Players(tmp_path / "cut", **given_)
    cut.play(1, steps[0])
    carries = contract_of(partial(play, **cut.options)).carries
    resumed = Players(tmp_path / "cut", **given_)
    carries.unpack(resumed.context(0), carries.pack(cut.context(1), **cut.options), **cut.options)
    with pytest.raises(DataError, match=r"began again when this run went on .* --fresh"):
        resumed.play(2, steps[1], drain=True)


def test_a_ledger_of_another_run_is_refused(tmp_path):
    steps = [["2", "3"], ["1", "2"]]
    Players(tmp_path / "first", window=1).steps(steps)
    ledger = str(tmp_path / "first" / "rollouts")
    with pytest.raises(DataError, match=r"has 2 rows of step 1, of which 0 are in play here"):
        Players(tmp_path / "other", window=1, ledger=ledger, n=3).steps(steps)
    with pytest.raises(DataError, match=r"has 2 of 4 rows in play in step 1, and none may go on"):
        Players(tmp_path / "drained", window=1, ledger=ledger).play(1, steps[0], drain=True)
    longer = Players(tmp_path / "longer", window=1, ledger=ledger)
    with pytest.raises(DataError, match="no rows of step 3"):
        longer.steps([*steps, ["1", "1"]])

    class Others(Echo):
        def step(self, action):
            return replace(super().step(action), observation="other")

    changed = Players(tmp_path / "changed", window=1, ledger=ledger, world=ThreadWorld(Others))
    with pytest.raises(DataError, match=r"tokens there, and other ones here"):
        changed.steps(steps)


@pytest.mark.parametrize(
    ("environments", "words"),
    [({"rows_per_episode": 2}, "rollout.window=1 with .*rows_per_episode=2"), ({"max_open": 9}, "window=1 .*max_open")],
)  # fmt: skip
def test_what_a_window_cannot_play_is_refused_by_name(environments, words):
    rollout = RolloutConfig(window=1, max_staleness=1)
    with pytest.raises(ConfigError, match=words):
        _check_partial_rollout(rollout=rollout, environments=EnvironmentsConfig(**environments))
    with pytest.raises(ConfigError, match=r"rollout\.window=1: an episode ends in the step"):
        _check_options(rollout=rollout, agent=lambda client, row: 0.0)
