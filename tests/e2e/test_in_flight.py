"""Weights that change while rows are generated: what a step has stored is enough to repeat it, to
the bit.
"""

from pathlib import Path

import pyarrow as pa
import pytest
from safetensors.torch import load_file

from siirl_dask.config import ModelConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Context, Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.nodes import generate
from siirl_dask.rollout import GenerationRequest, LocalQueue, Sampling
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.schema import TYPES
from siirl_dask.testing.in_flight import ScriptedWeights
from tests.conftest import digits_overrides
from tests.e2e.test_replay import cut_short, results
from tests.e2e.test_resume import weights

STEPS = 6
TURNS_FILE = shipped("quickstart_turns.yaml")
ENGINE = "rollout.engine=tests.e2e.recording_engine:SPEC"
GIVEN = ("rollout.in_flight=true", "rollout.max_staleness=1", f"run.steps={STEPS}",
         "checkpoint.every=3", "trainer.lr=1e-3", "cluster.workers=2", ENGINE)  # fmt: skip
ROWS = ("data.batch_size=4", "rollout.n=4", "rollout.max_response_length=48",
        "cluster.placement={rollout: [0], reward: [0], policy: [1]}")  # fmt: skip
TURNS = ("environments.environment=tests.e2e.worlds:Delayed", "environments.turns=4",
         "environments.turn_tokens=8", "rollout.max_response_length=48", "data.batch_size=4",
         "cluster.placement={rollout: [0], environments: [0], policy: [1]}")  # fmt: skip


class Stored:
    """The weights of one version, as a model has them."""

    def __init__(self, file):
        self._weights = load_file(file)

    def named_parameters(self):
        return iter(self._weights.items())


@pytest.fixture
def versions(tmp_path):
    folder = tmp_path / "versions"
    folder.mkdir()
    return folder


def recording(folder):
    return f"rollout.engine_options={{folder: {folder}, seconds: 0.02}}"


def models(folder):
    return {int(file.stem): Stored(file) for file in Path(folder).iterdir()}


def sampled(row):
    """Versions of the tokens that the policy sampled."""
    return [version for version in row["token_versions"] if version >= 0]


def check_ages(run, most=1):
    """The first token of a row is at most so many steps old; return the rows of each step."""
    steps = [run.table("rollouts", step).to_pylist() for step in range(1, STEPS + 1)]
    for step, rows in enumerate(steps, 1):
        for row in rows:
            own = sampled(row)
            assert own == sorted(own)
            assert max(0, step - 1 - most) <= own[0] == row["weights_version"]
            assert own[-1] <= step - 1
    assert sum(len({*sampled(row)}) > 1 for rows in steps for row in rows) > 4
    in_flight = [record["metrics"].get("rollout/weights_in_flight", 0) for record in run.records()]
    assert max(in_flight) >= 1
    assert in_flight[0] == in_flight[3] == 0, "nothing is newer after a drain"
    assert max(record["metrics"]["staleness/max"] for record in run.records()) <= most
    return steps


def repeated(config, step, rows, folder):
    """The rows of a step, generated again with weights that arrive where they did."""
    rollout = config.rollout
    engine = TransformersEngine(
        ModelConfig(path=config.model.path, dtype=config.model.dtype), max_rows=rollout.max_rows
    )
    stored = models(folder)
    longest = max(rows, key=lambda row: len(row["token_versions"]))["token_versions"]
    order = [*dict.fromkeys(longest)]
    engine.load_weights(stored[order[0]].named_parameters(), order[0])
    updates = [(longest.index(version) + 1, version) for version in order[1:]]
    arriving = ScriptedWeights(engine, stored, updates)
    firsts = [row for row in rows if row["sample_number"] == 0]
    prompts = {
        "row_id": [row["group_id"] for row in firsts],
        "group_id": [row["group_id"] for row in firsts],
        "tokens": [len(row["prompt_ids"]) for row in firsts],
        "prompt_ids": [row["prompt_ids"] for row in firsts],
    }
    table = pa.table({name: pa.array(values, TYPES[name]) for name, values in prompts.items()})
    context = Context(
        step=step,
        run_seed=config.run.seed,
        rank=Rank(),
        device=Device("w"),
        resource=engine,
        arriving_weights=arriving,
    )
    return generate(context, table, rollout=rollout).to_pylist()


def test_a_step_that_is_repeated_from_its_rows_versions_has_the_same_rows(
    digits_task, train, versions, tmp_path
):
    overrides = (*GIVEN, *ROWS, recording(versions))
    run = train("run", *overrides)
    steps = check_ages(run)
    given = [*digits_overrides(digits_task, tmp_path / "run"), *overrides]
    config = load_config_file(shipped("quickstart.yaml"), given).config
    same = ("row_id", "sampling_seed", "response_ids", "rollout_logprobs", "token_versions",
            "weights_version", "finish_reason")  # fmt: skip
    for step, rows in enumerate(steps, 1):
        again = {row["row_id"]: row for row in repeated(config, step, rows, versions)}
        for row in rows:
            assert {name: row[name] for name in same} == {
                name: again[row["row_id"]][name] for name in same
            }, step


@pytest.mark.parametrize(
    ("file", "more"),
    [(shipped("quickstart.yaml"), ROWS), pytest.param(TURNS_FILE, TURNS, marks=pytest.mark.slow)],
)
def test_a_run_that_was_killed_goes_on_to_the_same_weights(train, versions, file, more):
    """When it had stored the rows of its last step, of which it had trained none."""
    given = (*GIVEN, *more, recording(versions))
    run = train("run", *given, config_file=file)
    check_ages(run)
    tables = [run.table("rollouts", step) for step in range(1, STEPS + 1)]
    straight = weights(run)
    measured = results(run)
    cut_short(run, logged=4)
    resumed = train("run", *given, config_file=file)
    for step, table in enumerate(tables, 1):
        assert resumed.table("rollouts", step).equals(table), step
    assert all(tensor.equal(weights(resumed)[name]) for name, tensor in straight.items())
    for expected, got in zip(measured, results(resumed), strict=True):
        assert got["policy/loss"] == expected["policy/loss"]


def test_turns_go_on_under_new_weights_between_them_and_within(digits_task, train, versions):
    """Each part of a turn is what a request of those weights alone continues it with."""
    given = (*GIVEN, *TURNS, recording(versions))
    run = train("run", *given, config_file=TURNS_FILE)
    steps = check_ages(run)
    turns = [
        row["token_versions"][turn["start"] : turn["stop"]]
        for rows in steps
        for row in rows
        for turn in row["turns"]
    ]
    assert any(len({*own}) == 2 for own in turns), "within a turn"
    between = [
        [row["token_versions"][turn["start"]] for turn in row["turns"]]
        for rows in steps
        for row in rows
    ]
    assert any(len({*firsts}) == 2 for firsts in between), "between two turns"
    check_parts(digits_task.model, [row for rows in steps for row in rows], versions)


def check_parts(model_path, rows, folder):
    """Each token is the one that its version draws after those before it."""
    engine = TransformersEngine(ModelConfig(path=str(model_path)))
    for version, model in models(folder).items():
        engine.load_weights(model.named_parameters(), version)
        requests, expected = [], []
        for row in rows:
            whole = [{"start": 0, "stop": len(row["response_ids"])}]
            for turn in row.get("turns", whole):
                of_turn = range(turn["start"], turn["stop"])
                own = [at for at in of_turn if row["token_versions"][at] == version]
                if own:
                    before = [*row["prompt_ids"], *row["response_ids"][: own[0]]]
                    sampling = Sampling(max_tokens=len(own))
                    requests.append(
                        GenerationRequest(before, row["sampling_seed"], sampling, own[0])
                    )
                    expected.append([row["response_ids"][at] for at in own])
        queue = LocalQueue(requests)
        engine.serve(queue)
        assert [sample.token_ids for sample in queue.results()] == expected


@pytest.mark.parametrize(
    ("file", "more"),
    [(shipped("quickstart.yaml"), ROWS), pytest.param(TURNS_FILE, TURNS, marks=pytest.mark.slow)],
)
def test_rows_that_a_window_leaves_go_on_under_weights_of_each_step_and_within_it(
    digits_task, train, versions, file, more
):
    window = ("rollout.window=2", "rollout.max_staleness=3", "rollout.steps_ahead=1",
              "rollout.max_rows=6")  # fmt: skip
    run = train("run", *GIVEN, *more, recording(versions), *window, config_file=file)
    rows = [row for step in check_ages(run, most=3) for row in step]
    assert len({row["sampling_seed"] for row in rows}) == len(rows)
    left = [record["metrics"]["rollout/kept_for_next_step"] for record in run.records()]
    n = len(rows) // (4 * STEPS)
    assert left == [2 * n, 2 * n, 0, 2 * n, 2 * n, 0]
    check_parts(digits_task.model, rows, versions)


@pytest.mark.slow
def test_workers_that_take_over_rows_take_weights_each_at_its_time(digits_task, train, versions):
    """Two engines, up to two steps ahead; after the checkpoint both have the newest weights."""
    given = (
        *GIVEN, *ROWS, recording(versions), "rollout.max_staleness=2", "cluster.workers=3",
        "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2]}", "rollout.max_rows=2",
        "data.batch_size=3", "algorithm.minibatches=1", "rollout.max_response_length=32",
    )  # fmt: skip
    run = train("run", *given)
    rows = [row for step in check_ages(run, most=2) for row in step]
    check_parts(digits_task.model, rows, versions)
    taken_over = [record["metrics"]["rollout/taken_over"] for record in run.records()]
    assert sum(taken_over) > 0
    assert run.table("rollouts", 4)["weights_version"].unique().to_pylist() == [3]


def test_what_cannot_be_in_flight_is_refused_before_anything_starts(train):
    for more, said in (
        (("rollout.max_staleness=0",), r"in_flight=true with rollout\.max_staleness=0"),
        (("rollout.weight_sync=broadcast",), r"in_flight=true with rollout\.weight_sync=broadcast"),
        (("rollout.router_replay=true",), r"in_flight=true with rollout\.router_replay=true"),
        (("nodes.rollout.run=siirl_dask.nodes:generate_with_greedy",), "takes weights while"),
    ):
        with pytest.raises(ConfigError, match=said):
            train("refused", *GIVEN[:-1], *ROWS, "rollout.engine=transformers", *more)
