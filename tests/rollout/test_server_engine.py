"""Servers of vLLM that are there already: the suite of engines over one, rows as in this process,
servers that are killed, and servers that others use.
"""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

from safetensors.torch import load_file

from siirl_dask.config import Dtype, Engine, ModelConfig, RolloutConfig, Sampler, ServerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.rollout import GenerationRequest, LocalQueue, Sampling
from siirl_dask.rollout.server_engine.engine import ServerEngine
from siirl_dask.rollout.vllm_engine.engine import VllmEngine
from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model
from siirl_dask.testing.engines import EngineTests
from siirl_dask.testing.reference_model import PROMPTS, assert_agrees_with_trainer
from tests.rollout.same_samples import assert_same_samples
from tests.rollout.vllm_servers import VllmServer, servers
from tests.settings import rollout_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEVICE = Device("w0")


def engine_of(folder, urls, weights, rank=Rank(), patience=300.0, **settings):  # noqa: B008
    server = ServerConfig(urls=urls, weights_folder=str(weights), patience=patience)
    rollout = RolloutConfig(engine=Engine.server, max_rows=50, server=server, **settings)
    model = ModelConfig(path=str(folder), dtype=Dtype.float32)
    return ServerEngine(model, rollout, DEVICE, rank)


def other_weights(folder):
    weights = load_file(folder / "model.safetensors")
    return {name: 0.7 * tensor for name, tensor in weights.items()}


def long_responses(engine, at_the_first=None):
    """Return samples of up to 200 tokens; ``at_the_first`` is called once, when one of them is there
    and others are under way.
    """
    requests = [
        GenerationRequest([*prompt, row], row, Sampling(max_tokens=200))
        for row, prompt in enumerate(PROMPTS * 8)
    ]
    calls = [] if at_the_first is None else [at_the_first]

    def on_result(number, result):
        if calls:
            calls.pop()()

    queue = LocalQueue(requests, on_result)
    engine.serve(queue)
    assert not calls
    return queue.results()


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    """A model with a tied head, which vLLM packs for CPUs."""
    return tiny_model(
        tmp_path_factory.mktemp("served") / "model", seed=1, chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="module")
def pair(served_model, tmp_path_factory):
    """Two servers of it, for all tests: each starts in the time of a dozen of them."""
    with servers(served_model, tmp_path_factory.mktemp("servers"), 2) as started:
        yield started


class TestServerEngine(EngineTests):
    @pytest.fixture(scope="class")
    @classmethod
    def built_engine(cls, folder, pair, tmp_path_factory):
        engine = engine_of(
            folder, [server.url for server in pair], tmp_path_factory.mktemp("weights")
        )
        yield engine
        engine.close()

    def test_logprobs_equal_the_trainers_before_and_after_updates(self, engine, folder):
        assert_agrees_with_trainer(engine, folder, after=(0, 1, 5))


def test_rows_are_those_of_vllm_in_this_process(served_model, pair, tmp_path):
    """They stay so after an update, and on two servers, each of which has some of them, in batches that
    depend on when each request comes.
    """
    requests = [
        GenerationRequest([*prompt, row], 100 + row, Sampling(max_tokens=24), begun=row % 2)
        for row, prompt in enumerate(PROMPTS * 4)
    ]
    weights = load_file(served_model / "model.safetensors")
    weights = {name: 1.5 * tensor for name, tensor in weights.items()}
    found = []
    own = VllmEngine(
        ModelConfig(path=str(served_model)),
        rollout_config(engine=Engine.vllm, max_rows=50, kv_cache_memory="64MiB"),
        DEVICE,
    )
    for engine in (engine_of(served_model, [server.url for server in pair], tmp_path), own):
        made = []
        for version in (0, 3):
            if version:
                engine.load_weights(weights.items(), version)
                assert engine.version == version
            queue = LocalQueue(requests)
            engine.serve(queue)
            made.append(queue.results())
        engine.close()
        found.append(made)
    for served, expected in zip(*found, strict=True):
        assert_same_samples(served, expected)
    assert found[0][0] != found[0][1], "other weights sample other rows"
    assert not list(tmp_path.iterdir()), "files of weights are gone with the engine"


def test_a_server_that_is_killed_and_started_again_gets_its_weights_and_gives_the_same_rows(
    served_model, pair, tmp_path
):
    weights = other_weights(served_model)
    server = pair[1]
    engine = engine_of(served_model, [server.url], tmp_path / "weights")
    engine.load_weights(weights.items(), 1)
    expected = long_responses(engine)

    def kill_and_start():
        server.kill()
        server.start()

    found = long_responses(engine, kill_and_start)
    engine.close()
    assert_same_samples(found, expected)


def test_the_rows_of_a_server_that_is_killed_and_stays_away_come_from_the_other(
    served_model, pair, tmp_path
):
    weights = other_weights(served_model)
    server = pair[1]
    engine = engine_of(served_model, [each.url for each in pair], tmp_path / "weights")
    expected = long_responses(engine)
    assert_same_samples(long_responses(engine, server.kill), expected)
    engine.load_weights(weights.items(), 1)  # on the other alone
    server.start()
    server.wait()
    expected = long_responses(engine)
    assert_same_samples(long_responses(engine), expected)
    engine.close()


def test_an_engine_whose_weights_somebody_else_replaces_says_so(served_model, pair, tmp_path):
    url = pair[0].url
    first = engine_of(served_model, [url], tmp_path / "first")
    second = engine_of(served_model, [url], tmp_path / "second")
    assert second.generate(PROMPTS, range(6), Sampling(max_tokens=4))
    with pytest.raises(RunError, match="somebody else has replaced its weights"):
        first.generate(PROMPTS, range(6), Sampling(max_tokens=4))
    first.close()
    second.close()


def test_a_server_with_other_log_probs_or_another_number_type_is_refused(
    served_model, pair, tmp_path
):
    with pytest.raises(ConfigError, match="--logprobs-mode is processed_logits, and raw_logprobs"):
        engine_of(served_model, [pair[0].url], tmp_path, sampler=Sampler.vllm)
    server = ServerConfig(urls=[pair[0].url], weights_folder=str(tmp_path))
    rollout = RolloutConfig(engine=Engine.server, server=server)
    with pytest.raises(ConfigError, match=r"computes in float32, and model\.dtype is bfloat16"):
        ServerEngine(
            ModelConfig(path=str(served_model), dtype=Dtype.bfloat16), rollout, DEVICE, Rank()
        )


def test_a_run_gives_the_rows_of_vllm_in_its_workers(served_model, pair, train, tmp_path):
    """Two workers that generate, with a server each; the same seeds, so the same samples."""
    urls = ",".join(server.url for server in pair)
    common = (
        f"model.path={served_model}",
        "run.steps=3",
        "cluster.workers=2",
        "cluster.placement={}",
    )
    served = train(
        "served",
        "rollout.engine=server",
        f"rollout.server.urls=[{urls}]",
        f"rollout.server.weights_folder={tmp_path / 'weights'}",
        *common,
    )
    own = train("own", "rollout.engine=transformers", *common)
    columns = ["row_id", "prompt", "response_ids", "reward", "weights_version"]
    for step in (1, 2, 3):
        tables = [run.table("rollouts", step).select(columns) for run in (served, own)]
        assert tables[0].equals(tables[1]), step


def test_vllms_own_server_with_the_flags_of_the_page_samples_with_its_own_sampler(
    served_model, tmp_path
):
    """Seeds make its rows what they are, alone or together."""
    server = VllmServer(served_model, tmp_path / "log", "--logprobs-mode", "raw_logprobs")
    try:
        server.wait()
        engine = engine_of(served_model, [server.url], tmp_path / "weights", sampler=Sampler.vllm)
        sampling = Sampling(max_tokens=8)
        together = engine.generate(PROMPTS, range(6), sampling)
        alone = [
            engine.generate([prompt], [seed], sampling)[0] for seed, prompt in enumerate(PROMPTS)
        ]
        assert [row.token_ids for row in alone] == [row.token_ids for row in together]
        engine.close()
    finally:
        server.kill()
