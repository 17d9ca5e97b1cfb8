"""The engine of servers over a stand-in for SGLang's HTTP server: SGLang itself runs in no test."""

import asyncio
import importlib
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from siirl_dask.config import (
    Config,
    Dtype,
    Engine,
    ModelConfig,
    RolloutConfig,
    Sampler,
    ServerConfig,
)
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.rollout import FinishReason, GenerationRequest, LocalQueue, Sampling, check_engine
from siirl_dask.rollout.server_engine.answers import EndedByServerError, read_sglang_answer
from siirl_dask.rollout.server_engine.engine import ServerEngine
from siirl_dask.rollout.server_engine.examination import examine_servers
from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model
from siirl_dask.testing.engines import EngineTests
from siirl_dask.testing.reference_model import PROMPTS, assert_agrees_with_trainer

STAND_IN = str(Path(__file__).parents[1] / "fake_sglang")
URL = "http://127.0.0.1:30000"
REQUEST = GenerationRequest([1, 2], 3, Sampling(max_tokens=4))
FOUR = Sampling(max_tokens=4)


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    """The stand-in's modules, which are gone afterwards."""
    before = asyncio.get_event_loop_policy()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_IN)
        yield importlib.import_module("tests.rollout.sglang_servers")
    asyncio.set_event_loop_policy(before)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
    sys.modules.pop("tests.rollout.sglang_servers", None)


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    return tiny_model(
        tmp_path_factory.mktemp("served") / "model", seed=1, chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="module")
def server(stand_in, served_model):
    with stand_in.SglangHttpServer(served_model) as started:
        yield started


def rollout_of(urls, weights="/weights", **settings):
    server = ServerConfig(urls=urls, weights_folder=str(weights))
    return RolloutConfig(
        **{"engine": Engine.server, "sampler": Sampler.sglang, "max_rows": 50, "server": server}
        | settings
    )


def engine_of(folder, url, weights):
    model = ModelConfig(path=str(folder), dtype=Dtype.float32)
    return ServerEngine(model, rollout_of([url], weights), Device("w0"), Rank())


class TestServersOfSglang(EngineTests):
    takes_min_p = False

    @pytest.fixture(scope="class")
    @classmethod
    def built_engine(cls, folder, server, tmp_path_factory):
        engine = engine_of(folder, server.url, tmp_path_factory.mktemp("weights"))
        yield engine
        engine.close()

    def test_logprobs_equal_the_trainers_before_and_after_updates(self, engine, folder):
        assert_agrees_with_trainer(engine, folder, after=(0, 1))


def test_a_server_that_was_started_again_gets_the_weights_again(server, served_model, tmp_path):
    engine = engine_of(served_model, server.url, tmp_path)
    try:
        engine.load_weights(load_file(served_model / "model.safetensors").items(), 1)
        before = engine.generate(PROMPTS, range(6), FOUR)
        server.restart()
        assert engine.generate(PROMPTS, range(6), FOUR) == before
        server.weight_version = "somebody's"
        with pytest.raises(RunError, match="somebody else has replaced its weights"):
            engine.generate(PROMPTS, range(6), FOUR)
    finally:
        engine.close()


def test_a_server_that_still_takes_back_requests_is_asked_again_to_load_weights(
    server, served_model, tmp_path
):
    """Such as those of a worker that was killed: the run that went on ended as well."""
    engine = engine_of(served_model, server.url, tmp_path)
    try:
        server.busy = 2
        engine.load_weights(load_file(served_model / "model.safetensors").items(), 1)
        assert server.busy == 0
        assert server.weight_version == engine._servers.label
        server.busy = 3
        with pytest.raises(RunError, match="the cache was not flushed"):
            engine.load_weights(load_file(served_model / "model.safetensors").items(), 2)
    finally:
        server.busy = 0
        engine.close()


def test_a_server_that_cannot_load_weights_ends_the_run_with_its_words(
    server, served_model, tmp_path, monkeypatch
):
    engine = engine_of(served_model, server.url, tmp_path)
    try:
        empty = tmp_path / "empty"
        empty.mkdir()
        monkeypatch.setattr(engine._weights, "write", lambda weights, version: empty)
        with pytest.raises(RunError, match="Failed to get weights iterator"):
            engine.load_weights(load_file(served_model / "model.safetensors").items(), 1)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"enable_deterministic_inference": False}, "seeds of rows count with it alone"),
        ({"preferred_sampling_params": {"top_k": 5}}, "--preferred-sampling-params is"),
        ({"allow_auto_truncate": True}, "cuts prompts"),
        ({"rl_on_policy_target": "fsdp"}, "rounds log-probs"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm is 'EAGLE'"),
        ({"weight_cache_mode": "client"}, "takes no new weights"),
        ({"disaggregation_mode": "prefill"}, "two servers"),
        ({"weight_version": "mine"}, "--weight-version is 'mine'"),
        ({"json_model_override_args": '{"rope_theta": 1}'}, "--json-model-override-args is"),
        ({"dtype": "bfloat16"}, "--dtype is bfloat16, and model.dtype is float32"),
        ({"dtype": "auto"}, "start it with --dtype float32"),
        ({"enable_fp32_lm_head": True}, "model.float32_head is False"),
        ({"quantization": "fp8"}, "start it without --quantization"),
        ({"torchao_config": "int8wo"}, "start it without --torchao-config"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "start it without --kv-cache-dtype"),
    ],
)
def test_a_server_whose_samples_would_be_others_is_refused_by_its_argument(
    stand_in, served_model, arguments, said
):
    model = ModelConfig(path=str(served_model), dtype=Dtype.float32)
    with stand_in.SglangHttpServer(served_model, **arguments) as server:
        config = Config(model=model, rollout=rollout_of([server.url]))
        (found,) = examine_servers(config)
        assert found.cure, found
        assert said in f"{found.said}; {found.cure}"


def test_a_server_that_fits_is_described(server, served_model):
    model = ModelConfig(path=str(served_model), dtype=Dtype.float32)
    (found,) = examine_servers(Config(model=model, rollout=rollout_of([server.url])))
    assert not found.cure, found
    assert str(served_model) in found.said
    assert "float32" in found.said


def test_a_server_of_the_other_kind_is_refused_with_the_key_to_change(server, served_model):
    model = ModelConfig(path=str(served_model))
    rollout = rollout_of([server.url], sampler=Sampler.exact)
    (found,) = examine_servers(Config(model=model, rollout=rollout))
    assert "rollout.sampler=sglang" in found.said


def test_a_response_that_a_server_has_ended_is_told_from_one_of_another_form():
    """It is asked for again: of another form none would be."""
    ended = {"type": "abort", "message": "the server is shutting down"}
    with pytest.raises(EndedByServerError, match="the server is shutting down"):
        read_sglang_answer(answer_of([5], [-0.5], finish_reason=ended), REQUEST, {6}, URL)


def answer_of(tokens, logprobs, reason="length", **more):
    pairs = [[logprob, token, None] for token, logprob in zip(tokens, logprobs, strict=True)]
    meta = {"output_token_logprobs": pairs, "finish_reason": {"type": reason}}
    meta["weight_version"] = "a-1"
    return {"output_ids": tokens, "meta_info": meta | more}


def test_an_answer_is_read_with_the_labels_of_all_weights_that_sampled_it():
    read = read_sglang_answer(answer_of([5, 6], [-0.5, -0.25], "stop"), REQUEST, {6}, URL)
    assert read.generation.token_ids == [5, 6]
    assert read.generation.logprobs == [-0.5, -0.25]
    assert read.generation.finish_reason is FinishReason.STOP
    assert read.labels == {"a-1"}
    spans = [{"version": "a-0", "start": 0, "end": 1}, {"version": "a-1", "start": 1, "end": 2}]
    changed = answer_of([5, 6], [-0.5, -0.25], "stop", weight_versions=spans)
    assert read_sglang_answer(changed, REQUEST, {6}, URL).labels == {"a-0", "a-1"}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "has not the form"),
        ({"output_ids": [5]}, "has not the form"),
        (answer_of([5], [-0.5], "error"), "ended by something else"),
        (
            answer_of([6], [-0.5], finish_reason={"type": "stop", "matched": "NaN happened"}),
            "logits that are not finite",
        ),
        (answer_of([5], [-0.5], "x" * 10**6), "ended by something else"),
        (answer_of([5], [-0.5], finish_reason=None), "has not the form"),
        (answer_of([5], [-0.5], weight_versions=5), "has not the form"),
        (answer_of([5], [-0.5], output_token_logprobs=[[-0.5]]), "has not the form"),
        (answer_of([5] * 4, [-0.5, None, -0.5, -0.5]), "not finite"),
        (answer_of([5], [-0.5], output_token_logprobs=[[-0.5, 6, None]]), "other tokens"),
        (answer_of([-5], [-0.5]), "expected a token"),
        (answer_of([], []), "other tokens than it sampled"),
        (answer_of([1] * 5, [-0.5] * 5), "at most 4 were asked for"),
        (answer_of([5] * 4, [float("-inf")] * 4), "not finite"),
        (answer_of([5] * 4, [0.5] * 4), "as a log-probability"),
        (answer_of([5] * 3, [-0.5] * 3), "cut a response at 3 tokens, and 4 were asked for"),
        (answer_of([6, 5], [-0.5] * 2, "stop"), "with the token 5, which ends none"),
        (answer_of([6] * 4, [-0.5] * 4), "went on after a token that ends a response"),
    ],
)
def test_an_answer_of_another_form_is_an_error_that_names_the_server(found, said):
    with pytest.raises(RunError, match=said) as refused:
        read_sglang_answer(found, REQUEST, {6}, URL)
    assert URL in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"min_p": 0.1}, "together with seeds"),
        ({"top_k": 1, "temperature": 0.7}, "log-probs of temperature 1"),
        ({"engine": Engine.transformers, "server": ServerConfig()}, "rollout.engine is transf"),
    ],
)
def test_sampling_that_sglang_cannot_do_is_refused_in_the_configuration(settings, said):
    with pytest.raises(ConfigError, match=said):
        rollout_of([URL], **settings)


def test_workers_have_servers_of_their_own_and_no_memory_for_the_model(served_model):
    model = ModelConfig(path=str(served_model))
    rollout = rollout_of([URL])
    cost = check_engine({"model": model, "rollout": rollout}, ["0"], Config(model=model))
    assert cost.memory == 0


def test_a_request_is_answered_by_the_weights_in_use(server, served_model, tmp_path):
    engine = engine_of(served_model, server.url, tmp_path)
    try:
        queue = LocalQueue([REQUEST])
        engine.serve(queue)
        assert len(queue.results()[0].token_ids) <= REQUEST.sampling.max_tokens
        assert server.answered[-1] == engine._servers.label
    finally:
        engine.close()
