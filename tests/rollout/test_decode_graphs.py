"""Captured steps of fixed shapes give the samples of the loop that has neither."""

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from siirl_dask.config import Dtype, Engine, ModelConfig
from siirl_dask.models.architecture import Architecture
from siirl_dask.models.shapes import ModelSize
from siirl_dask.rollout import Sampling, engine_spec, memory
from siirl_dask.rollout.transformers_engine.decode_graphs import DecodeGraphs, decode_graphs
from siirl_dask.rollout.transformers_engine.decoding import decode, use_decoding
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.tasks.tiny_model import tiny_model
from tests.rollout.test_decoding import SIZES, assert_same, prompts, sampled
from tests.settings import rollout_config

LIMITS = [1 + 5 * (row % 12) for row in range(18)]
"""Limits of the rows of ``prompts()``, which end at different times."""
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3 with windows": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "use_sliding_window": True,
        },
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    ),
}


class Recorded(TorchDispatchMode):
    """Stands in for a device's graph: what a step does is noted once, with its numbers as they are
    then, and replayed in the same memory. So a number of the host that changes from token to token
    shows, as it would on a GPU, and so does a tensor that is somewhere else since.
    """

    def __init__(self):
        super().__init__()
        self.calls = []
        self.made = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        given, shape = tree_flatten((arguments, options or {}))
        # to put lists and options together takes as long again as the call
        if not options and not any(isinstance(each, list | tuple) for each in arguments):
            shape = None
        results = tree_leaves(result)
        self.calls.append((function, list(map(self.where, given)), shape, results))
        self.made |= {id(each) for each in results}
        return result

    def where(self, each):
        """A tensor that the step did not make itself stands for the memory that it has now."""
        return each.detach() if torch.is_tensor(each) and id(each) not in self.made else each

    def replay(self):
        made = {}
        for function, given, shape, before in self.calls:
            now = [made.get(id(each), each) for each in given]
            if shape is None:
                result = function(*now)
            else:
                arguments, options = tree_unflatten(now, shape)
                result = function(*arguments, **options)
            for old, new in zip(before, tree_leaves(result), strict=True):
                made[id(old)] = new


class Captures:
    """Captures steps, and counts captures and replays."""

    def __init__(self):
        self.captured = 0
        self.replayed = 0

    def __call__(self, step):
        self.captured += 1
        with Recorded() as graph:
            step()

        def replay():
            self.replayed += 1
            graph.replay()

        return replay


@pytest.fixture(autouse=True)
def small_columns(monkeypatch):
    """Caches begin with 8 columns, so that a short response needs several."""
    monkeypatch.setattr(memory, "_LEAST_COLUMNS", 8)


def model_of(kind):
    torch.manual_seed(1)
    model, config, options = MODELS[kind]
    return model(config(**SIZES, **options)).eval()


def by_graphs(graphs):
    def sample(*arguments):
        return decode(*arguments, graphs=graphs)

    return sample


@pytest.mark.parametrize("kind", MODELS)
def test_samples_are_those_of_the_loop_without_graphs(kind):
    """Prompts are shared, rows end at different times, and the cache has several sizes."""
    model, captures = model_of(kind), Captures()
    assert use_decoding(model)
    expected = sampled(decode, model, prompts(), LIMITS)
    seen = []
    found = sampled(
        by_graphs(DecodeGraphs(model, lambda: captures)), model, prompts(), LIMITS, seen
    )
    assert_same(found, expected)
    assert captures.replayed == len(seen) - 1 > captures.captured > 4


def test_graphs_stay_for_the_next_batch_and_see_weights_that_are_replaced_in_place():
    model, captures = model_of("qwen3"), Captures()
    assert use_decoding(model)
    graphs = DecodeGraphs(model, lambda: captures)
    before = sampled(by_graphs(graphs), model, prompts(), LIMITS)
    captured = captures.captured
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0) * 1.5)
    expected = sampled(decode, model, prompts(), LIMITS)
    assert [tokens for tokens, _ in expected] != [tokens for tokens, _ in before]
    assert_same(sampled(by_graphs(graphs), model, prompts(), LIMITS), expected)
    small = sampled(decode, model, prompts(1, 1), [9])
    assert_same(sampled(by_graphs(graphs), model, prompts(1, 1), [9]), small)
    again = captures.captured
    assert_same(sampled(by_graphs(graphs), model, prompts(1, 1), [9]), small)
    assert captures.captured == again < 2 * captured


def test_graphs_are_dropped_where_a_parameter_is_somewhere_else():
    """As a replay would read what was there before."""
    model, captures = model_of("qwen3"), Captures()
    assert use_decoding(model)
    graphs = DecodeGraphs(model, lambda: captures)
    sampled(by_graphs(graphs), model, prompts(), LIMITS)
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0) * 1.5
    expected = sampled(decode, model, prompts(), LIMITS)
    assert_same(sampled(by_graphs(graphs), model, prompts(), LIMITS), expected)


def test_a_larger_batch_and_longer_rows_get_memory_of_their_own():
    model, captures = model_of("llama"), Captures()
    assert use_decoding(model)
    graphs = DecodeGraphs(model, lambda: captures)
    for rows, limits in ((prompts(1, 2), [3, 3]), (prompts(), LIMITS), (prompts(2, 1), [90, 90])):
        expected = sampled(decode, model, rows, limits)
        assert_same(sampled(by_graphs(graphs), model, rows, limits), expected)


def test_a_batch_of_weights_that_are_not_finite_leaves_nothing_to_the_next():
    model, captures = model_of("llama"), Captures()
    assert use_decoding(model)
    graphs, rows, limits = DecodeGraphs(model, lambda: captures), prompts(3, 1), [20] * 3
    expected = sampled(decode, model, rows, limits)
    held = [parameter.clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        sampled(by_graphs(graphs), model, rows, limits)
        for parameter, value in zip(model.parameters(), held, strict=True):
            parameter.copy_(value)
    assert_same(sampled(by_graphs(graphs), model, rows, limits), expected)


def test_a_model_that_cannot_be_captured_goes_on_without_and_the_log_says_so_once(caplog):
    model, tried = model_of("llama"), []
    assert use_decoding(model)

    def refuse(step):
        tried.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(model, lambda: refuse)
    expected = sampled(decode, model, prompts(), LIMITS)
    with caplog.at_level(logging.WARNING, "siirl_dask.rollout"):
        for _ in range(2):
            assert_same(sampled(by_graphs(graphs), model, prompts(), LIMITS), expected)
    assert len(tried) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "LlamaForCausalLM decodes without graphs, which takes longer on short steps: RuntimeError: "
        "operation not permitted when stream is capturing"
    ]


def test_an_engine_on_a_cpu_has_no_graphs_and_one_with_them_samples_the_same_and_drops_them_to_sleep(
    tmp_path,
):
    engine = TransformersEngine(ModelConfig(path=str(tiny_model(tmp_path / "model", seed=1))))
    assert engine._graphs is None
    rows, sampling = prompts(), Sampling(max_tokens=20)
    expected = engine.generate(rows, range(len(rows)), sampling)
    captures = Captures()
    engine._graphs = DecodeGraphs(engine._model, lambda: captures)
    for _ in range(2):
        found = engine.generate(rows, range(len(rows)), sampling)
        assert [sample.token_ids for sample in found] == [sample.token_ids for sample in expected]
        engine.sleep()
        assert not engine._graphs._memory
        assert not engine._graphs._replays
    assert captures.replayed > captures.captured > 0


def test_the_plan_counts_the_whole_cache_of_fixed_shape(monkeypatch):
    """With rows and columns rounded up: prompts of 9 tokens at most, and responses of 56."""
    model = model_of("qwen3")
    assert use_decoding(model)
    graphs = DecodeGraphs(model, Captures)
    rows = prompts()
    longest = max(map(len, rows)) + max(LIMITS)
    sampled(by_graphs(graphs), model, rows, LIMITS)
    taken = sum(part.nbytes for pair in graphs._memory.values() for part in pair)
    engine_memory = engine_spec(Engine.transformers).memory
    counted = engine_memory.footprint(
        memory.EngineOnWorkers(
            size=ModelSize(0, 0, 0),
            architecture=Architecture(
                layers=2,
                hidden=32,
                heads=4,
                kv_heads=2,
                head_dim=16,
                intermediate=64,
                vocabulary=64,
            ),
            rollout=rollout_config(engine=Engine.transformers, max_rows=len(rows)),
            dtype=Dtype.float32,
            longest=longest,
        )
    ).working["keys and values"]
    assert counted == taken


def test_no_steps_are_captured_on_a_device_without_graphs():
    assert decode_graphs(model_of("llama"), torch.device("cpu")) is None


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 100, 255, 256, 257, 1000, 4097])
def test_shapes_are_few_and_hold_what_they_must(monkeypatch, count):
    monkeypatch.undo()
    assert count <= memory.cache_rows(count) < 2 * count
    assert max(256, count) <= memory.cache_columns(count) <= max(256, 1.25 * count)
    assert len({memory.cache_columns(each) for each in range(1, 4097)}) == 17
