"""Engines in processes of their own: the suite of engines over one, rows as in the worker's process,
processes that are killed or crash, and that nothing is left of any of them.
"""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from siirl_dask.cli import main
from siirl_dask.config import (
    Config,
    Dtype,
    Engine,
    ImagesConfig,
    ModelConfig,
    RolloutConfig,
    VllmConfig,
)
from siirl_dask.config.file import shipped
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, DataError, RunError
from siirl_dask.images import Image
from siirl_dask.models.shapes import count_parameters
from siirl_dask.rollout import GenerationRequest, LocalQueue, Sampling, build_engine, check_engine
from siirl_dask.rollout.process_engine.engine import ProcessEngine
from siirl_dask.rollout.process_engine.errors_as_data import describe_error, read_error
from siirl_dask.rollout.process_engine.frames import FAILED, MessageSocket
from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.engines import EngineTests
from siirl_dask.testing.image_engines import image_requests, serve
from siirl_dask.testing.reference_model import PROMPTS
from tests.conftest import digits_overrides
from tests.rollout.same_samples import assert_same_samples

ROOT = Path(__file__).parents[2]
DEVICE = Device("w0")
CRASHING = "tests.rollout.crashing_engine:SPEC"
STAGED = "tests.rollout.crashing_engine:STAGED"
NEEDS_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
ENGINES = [
    Engine.transformers,
    pytest.param(Engine.vllm, marks=[pytest.mark.sweep, NEEDS_VLLM]),
]
"""The processes send each other the same for every engine; vLLM's rows are in its suite below."""


def engine_of(
    folder, *, process=True, engine=Engine.transformers, images=None, device=DEVICE, **settings
):
    vllm = VllmConfig(kv_cache_memory="64MiB") if engine == Engine.vllm else VllmConfig()
    rollout = RolloutConfig(engine=engine, process=process, vllm=vllm, **settings)
    model = ModelConfig(path=str(folder), dtype=Dtype.float32)
    return build_engine(device, Rank(), model=model, rollout=rollout, images=images)


def rows(count, tokens=24):
    return [
        GenerationRequest(
            [*PROMPTS[row % len(PROMPTS)], row], 100 + row, Sampling(max_tokens=tokens), row % 2
        )
        for row in range(count)
    ]


def responses(engine, requests, on_result=None):
    queue = LocalQueue(requests, on_result)
    engine.serve(queue)
    return queue.results()


def other_weights(folder):
    weights = load_file(folder / "model.safetensors")
    return {name: 1.5 * tensor for name, tensor in weights.items()}


def alive(pids):
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return psutil.wait_procs(processes, timeout=20)[1]


def of_group(leader):
    """Numbers of the processes in the group that it began."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader:
                found.append(process.pid)
        except ProcessLookupError:
            pass
    return found


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    return tiny_model(
        tmp_path_factory.mktemp("model") / "model", seed=1, chat_template=CHAT_TEMPLATE
    )


class ProcessEngineTests(EngineTests):
    engine_name: Engine

    @classmethod
    def make_engine(cls, folder):
        return engine_of(folder, engine=cls.engine_name, max_rows=50)

    def test_rows_are_those_of_the_workers_process_to_the_bit_also_after_it_was_killed(
        self, engine, folder
    ):
        """The second kill is while it delivers, with weights that came after its start."""
        requests = rows(60)
        weights = other_weights(folder)
        own = engine_of(folder, process=False, engine=self.engine_name, max_rows=50)
        expected = [responses(own, requests)]
        own.load_weights(weights.items(), 3)
        expected.append(responses(own, requests))
        own.close()
        assert expected[0] != expected[1], "other weights sample other rows"
        assert responses(engine, requests) == expected[0]
        os.kill(engine.pid, signal.SIGKILL)
        assert responses(engine, requests) == expected[0]
        engine.load_weights(weights.items(), 3)
        assert responses(engine, requests) == expected[1]
        first = engine.pid
        delivered = []
        before_the_kill = set()

        def note(number, _):
            delivered.append(number)
            if len(delivered) == 7:
                before_the_kill.update(delivered)
                os.kill(engine.pid, signal.SIGKILL)

        found = responses(engine, requests, note)
        # how many rows the process had sent by then, and so the size of the next batch, is chance
        assert_same_samples(found, expected[1], to_the_bit=before_the_kill)
        assert engine.pid != first
        assert sorted(delivered) == list(range(60)), "each response is delivered once"
        assert engine.version == 3

    def test_what_the_workers_queue_raises_ends_the_call_and_not_the_process(self, engine, capfd):
        class Interrupted(LocalQueue):
            asked = 0

            def next(self, limit, *, wait):
                self.asked += 1
                if self.asked == 3:
                    raise LookupError("the run is over")
                return super().next(min(2, limit), wait=wait)

        before = engine.pid
        with pytest.raises(LookupError, match="the run is over"):
            engine.serve(Interrupted(rows(6)))

        def refuse(number, result):
            raise LookupError("no more")

        with pytest.raises(LookupError, match="no more"):
            responses(engine, rows(3), refuse)
        unsent = [replace(request, begun={0}) for request in rows(1)]
        with pytest.raises(TypeError, match="set"):
            responses(engine, unsent)
        assert len(responses(engine, rows(3))) == 3
        assert engine.pid == before
        assert "Traceback" not in capfd.readouterr().err, "it is no bug of the engine's"

    def test_an_error_of_the_engines_is_raised_in_the_worker(self, engine):
        shown = [replace(request, images=(Image(b"no picture"),)) for request in rows(1)]
        with pytest.raises(ConfigError, match="a prompt shows 1 images"):
            responses(engine, shown)


class TestTransformersInAProcess(ProcessEngineTests):
    engine_name = Engine.transformers


@pytest.mark.slow
@pytest.mark.timeout(600)
@NEEDS_VLLM
class TestVllmInAProcess(ProcessEngineTests):
    engine_name = Engine.vllm


@pytest.fixture
def crashing(served_model, tmp_path, monkeypatch):
    """Build an engine that crashes at a token; temporary files of its processes are in a folder of
    the test's.
    """
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("HUB_TOKEN", "secret")
    built = []

    def build(at, *, stays=False, raises=False, starts=False):
        (tmp_path / "marker").touch()
        options = {"log": str(tmp_path / "log"), "marker": str(tmp_path / "marker")}
        options |= {"at": at, "stays": stays, "raises": raises, "starts": starts}
        engine = engine_of(served_model, engine=CRASHING, engine_options=options, max_rows=3)
        built.append(engine)
        return engine

    yield build
    for engine in built:
        engine.close()
    assert not list(scratch.iterdir())


def batches(tmp_path):
    """Rows of each batch that its processes have begun."""
    return [
        [int(seed) - 100 for seed in line.split()]
        for line in (tmp_path / "log").read_text().splitlines()
    ]


def test_a_crash_costs_the_rows_under_way_and_no_other(crashing, served_model, tmp_path, capfd):
    """The process dies in its second batch, and the next one has its rows as one batch again."""
    requests = rows(8, tokens=8)
    engine = crashing(at=11)
    lost = of_group(engine.pid)
    environment = psutil.Process(engine.pid).environ()
    assert "HUB_TOKEN" not in environment, "it needs no secret"
    assert not psutil.Process(engine.pid).net_connections("inet"), "it listens nowhere"
    found = responses(engine, requests)
    assert batches(tmp_path) == [[0, 1, 2], [3, 4, 5], [3, 4, 5], [6, 7]]
    plain = engine_of(served_model, process=False, max_rows=3)
    assert found == responses(plain, requests)
    assert not alive(lost)
    later = of_group(engine.pid)
    engine.close()
    assert not alive(later)
    assert "the engine is about to crash" in capfd.readouterr().err


@pytest.mark.slow
def test_what_a_crashed_engine_had_started_ends_without_the_process_that_watches(crashing):
    """The watching one may be killed as well, and some kernels have no means for it."""
    engine = crashing(at=2, starts=True)
    first = engine.pid
    for watching in of_group(first):
        if watching != first:
            os.kill(watching, signal.SIGKILL)
    assert len(responses(engine, rows(2, tokens=4))) == 2
    assert engine.pid != first
    assert not alive(of_group(first))


def test_a_process_that_cannot_be_started_leaves_no_folder(served_model, tmp_path, monkeypatch):
    def refuse(*words, **settings):
        raise OSError("too many processes")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="too many processes"):
        engine_of(served_model)
    assert not list(tmp_path.iterdir())


def test_an_error_that_utf_8_cannot_hold_is_sent():
    """Names of files have such characters."""
    here, there = socket.socketpair()
    with here, there:
        MessageSocket(here).send(FAILED, describe_error(DataError("caf\udce9")))
        error = read_error(MessageSocket(there).receive().value)
    assert isinstance(error, DataError)
    assert str(error) == "caf?"


def test_stages_of_a_command_go_on_while_weights_are_loaded_in_it(served_model):
    shown = []

    @contextmanager
    def stage(name):
        shown.append(name)
        yield
        shown.append(f"end: {name}")

    class Arriving:
        waiting = 1

        def arrived(self):
            return self.waiting > 0

        def load(self):
            self.waiting = 0
            engine.load_weights(other_weights(served_model).items(), 1)

    engine = engine_of(
        served_model,
        engine=STAGED,
        device=Device("w0", stage=stage),
        in_flight=True,
        max_staleness=1,
    )
    shown.clear()
    queue = LocalQueue(rows(2, tokens=4))
    engine.serve_in_flight(queue, Arriving())
    assert shown == ["it serves", "it loads", "end: it loads", "end: it serves"]
    assert [row.versions for row in queue.results()] == [[1] * 4] * 2
    engine.close()


@pytest.mark.slow
def test_a_process_that_crashes_without_a_response_each_time_ends_the_run_and_says_how(
    crashing, tmp_path
):
    engine = crashing(at=4, stays=True)
    with pytest.raises(RunError) as ended:
        responses(engine, rows(4))
    said = str(ended.value)
    assert "was ended by SIGKILL; the last that it said" in said
    assert "the engine is about to crash" in said
    assert batches(tmp_path) == [[0, 1, 2], [0, 1, 2]]
    (tmp_path / "marker").unlink()
    assert len(responses(engine, rows(4))) == 4, "it can be used again"


@pytest.mark.slow
def test_a_bug_in_the_engine_is_an_error_with_its_words_and_no_loss(
    crashing, capfd, monkeypatch, tmp_path
):
    """Also where nobody takes its output."""
    engine = crashing(at=2, raises=True)
    before = engine.pid
    said = r"raised KeyError in its process: .*a bug of the engine's"
    with pytest.raises(RunError, match=said):
        responses(engine, rows(2))
    assert len(responses(engine, rows(2))) == 2
    assert "Traceback" in capfd.readouterr().err
    (tmp_path / "marker").touch()
    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as without:
        without.setattr(sys, "stderr", closed)
        with pytest.raises(RunError, match=said):
            responses(engine, rows(2))
        assert len(responses(engine, rows(2))) == 2
    assert engine.pid == before


@pytest.mark.parametrize("forked", ["", "os.fork() or time.sleep(600)\n"], ids=["alone", "forked"])
def test_a_process_ends_with_the_worker_that_is_killed(forked, served_model, tmp_path):
    """All of its group, and its folder, also where a process lives on that the worker forked."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = (
        "from siirl_dask.models.broken_imports import hide; hide()\n"
        "import os, sys, time\n"
        "from tests.rollout.test_process_engine import engine_of\n"
        "engine = engine_of(sys.argv[1])\n"
        f"{forked}"
        "print(engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(served_model)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        engine = int(owner.stdout.readline())
        group = of_group(engine)
        assert engine in group
        assert list(scratch.glob("siirl-engine-*"))
        owner.kill()
        owner.wait()
        assert not alive(group)
        assert not list(scratch.glob("siirl-engine-*"))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(owner.pid, signal.SIGKILL)
        owner.wait()
        owner.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_routes_of_experts_and_images_pass_to_the_bit(engine, tmp_path):
    folder = tiny_model(tmp_path / "experts", seed=2, family="qwen3_moe", tied=False)
    found = []
    for process in (False, True):
        built = engine_of(folder, process=process, engine=engine, router_replay=True)
        found.append(responses(built, rows(9)))
        assert built.routing is not None
        built.close()
    assert found[0] == found[1]
    assert found[0][0].routes
    folder = tiny_vlm(tmp_path / "images", family="qwen3_vl")
    images = ImagesConfig(column="images")
    found = []
    for process in (False, True):
        built = engine_of(folder, process=process, engine=engine, images=images)
        requests = image_requests(folder, built.processor, 9, Sampling(max_tokens=6))
        found.append(serve(built, requests))
        with pytest.raises(DataError):
            serve(built, [replace(requests[1], images=())])
        built.close()
    assert found[0] == found[1]


@pytest.mark.sweep
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_gives_the_rows_of_engines_in_its_workers(engine, train):
    """Two workers that generate, with a process each. Neither takes over rows of the other's, which
    time would decide: a row's log-probs differ in their last bits with the batch that it is in.
    """
    common = (
        "rollout.work_stealing=false",
        "run.steps=2",
        "cluster.workers=2",
        "cluster.placement={}",
        f"rollout.engine={engine}",
    )
    apart = train("apart", "rollout.process=true", *common)
    own = train("own", *common)
    columns = ["row_id", "prompt", "response_ids", "reward", "weights_version", "rollout_logprobs"]
    for step in (1, 2):
        tables = [run.table("rollouts", step) for run in (apart, own)]
        for column in columns:
            found = [table[column].to_pylist() for table in tables]
            assert found[0] == found[1], (step, column)


@pytest.mark.slow
def test_a_run_whose_engine_crashes_goes_on_with_its_workers_and_the_same_rows(train, tmp_path):
    """The crash is in the second step: the next process gets the weights of the first."""
    marker = tmp_path / "marker"
    marker.touch()
    options = f"{{log: {tmp_path / 'log'}, marker: {marker}, at: 12, stays: false, raises: false}}"
    common = ("run.steps=3", "cluster.workers=1", "cluster.placement={}", "run.max_restarts=0")
    apart = train(
        "apart",
        "rollout.process=true",
        f"rollout.engine={CRASHING}",
        f"rollout.engine_options={options}",
        *common,
    )
    assert not marker.exists(), "its engine has crashed"
    own = train("own", *common)
    columns = ["row_id", "response_ids", "rollout_logprobs", "weights_version"]
    for step in (1, 2, 3):
        tables = [run.table("rollouts", step).select(columns) for run in (apart, own)]
        assert tables[0].equals(tables[1]), step


@pytest.mark.slow
def test_drafts_are_counted_in_the_worker(served_model):
    requests = rows(12)
    found = []
    for process in (False, True):
        engine = engine_of(served_model, process=process, draft_tokens=3)
        found.append((responses(engine, requests), engine.take_passes()))
        assert engine.take_passes().passes == 0
        engine.close()
    assert found[0] == found[1]
    assert found[0][1].tokens > 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.engine=sglang", "rollout.sampler=sglang"], "abilities.process"),
        (
            [
                "rollout.engine=server",
                "rollout.server.urls=[http://127.0.0.1:1,http://127.0.0.1:2]",
                "rollout.server.weights_folder=/nowhere",
            ],
            "abilities.process",
        ),
    ],
)
def test_engines_that_cannot_are_refused_by_plan(overrides, said, capsys, digits_task, tmp_path):
    given = digits_overrides(digits_task, tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(shipped("quickstart.yaml")), *given, "rollout.process=true", *overrides])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(f"rollout.process=true.*{said}", line), line


@pytest.mark.parametrize("size", [1, 2])
def test_the_plan_counts_the_weights_that_wait_for_the_next_process(size, served_model):
    """All of them, on each worker of an engine."""
    model = ModelConfig(path=str(served_model))
    costs = []
    for process in (False, True):
        rollout = RolloutConfig(engine=Engine.vllm, process=process, tensor_parallel_size=size)
        config = Config(rollout=rollout)
        costs.append(check_engine({"model": model}, ["0", "1"], config))
    weights = 4 * count_parameters(str(served_model)).total
    assert costs[1].memory == costs[0].memory + weights
    assert costs[1].notes != costs[0].notes


def test_the_plan_proposes_ranks_also_to_an_engine_that_takes_weights_in_flight(served_model):
    rollout = RolloutConfig(engine=Engine.vllm, in_flight=True, max_staleness=1)
    config = Config(rollout=rollout)
    cost = check_engine({"model": ModelConfig(path=str(served_model))}, ["0", "1"], config)
    proposed = [remedy.setting for remedy in cost.device.remedies]
    assert "rollout.tensor_parallel_size=2" in proposed


def test_the_engine_of_a_worker_is_built_in_its_process_unless_asked_for(served_model):
    engine = engine_of(served_model, process=False)
    assert not isinstance(engine, ProcessEngine)
    engine.close()
