"""The specs of shipped engines: found by name, light to import, and asked in place of switches."""

import subprocess
import sys
from functools import partial

import pytest

from siirl_dask.config import (
    Config,
    Dtype,
    Engine,
    ImagesConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    Sampler,
)
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.planner import Role
from siirl_dask.planner.role_contract import specs_of
from siirl_dask.rollout import (
    Abilities,
    EngineInputs,
    EngineSpec,
    RolloutEngine,
    build_engine,
    check_engine,
    engine_spec,
    processor_of,
)
from siirl_dask.rollout.engine import routing_of
from siirl_dask.rollout.specs import ENGINES, alternatives, process_environment
from siirl_dask.worker.roles.lazy_role import built_when_used
from tests.settings import rollout_config


def test_each_engine_of_the_configuration_has_a_spec_of_its_name():
    assert sorted([*ENGINES, "auto"]) == sorted(Engine)
    assert [engine_spec(name).name for name in ENGINES] == list(ENGINES)


def test_importing_the_specs_imports_no_library_that_computes():
    heavy = ("torch", "transformers", "vllm", "sglang")
    code = (
        "import sys; from siirl_dask.rollout.specs import ENGINES, engine_spec\n"
        "for name in ENGINES: engine_spec(name)\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "[]\n"
    )


def test_an_engine_is_advised_by_what_it_can_do():
    assert alternatives("sglang", lambda able: able.images) == "rollout.engine=vllm or transformers"
    assert (
        alternatives("transformers", lambda able: Sampler.exact in able.samplers)
        == "rollout.engine=vllm"
    )


def test_auto_looks_for_an_engine_and_prepares_processes_for_all_that_it_may_take(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert engine_spec("auto").name == "transformers"
    assert process_environment("auto") == process_environment("vllm") != {}
    assert process_environment("transformers") == {}
    with pytest.raises(
        ConfigError, match=r"rollout.vllm.max_num_seqs=3: only vLLM reads this, .*auto takes transf"
    ):
        check_engine({"rollout": rollout_config(max_num_seqs=3)}, ["0"], Config())


@pytest.mark.parametrize(
    "name", ["vlm", "sglan", "my_engine", "my_engine:", ":SPEC", "my_engine:SPEC.more"]
)
def test_a_name_that_is_no_engines_is_refused_before_anything_is_imported(name):
    with pytest.raises(
        ConfigError, match=rf"rollout\.engine='{name}': expected one of \['transformers', 'vllm'"
    ):
        RolloutConfig(engine=name)
    with pytest.raises(ConfigError, match=r"rollout\.engine"):
        engine_spec(name)


# An engine of a test's, which this process alone can import


class Images:
    """An engine that sees images and records routes."""

    processor = "a processor"
    routing = "some routers"


def _build(inputs: EngineInputs) -> RolloutEngine:
    return Images()


SPEC = EngineSpec(name="images", build=_build, abilities=Abilities(images=True))
OF_TEXTS = EngineSpec(name="texts", build=_build)
ROLLOUT = RolloutConfig(engine=f"{__name__}:SPEC")


def test_the_spec_of_an_engine_of_ones_own_travels_to_the_workers_and_that_of_a_shipped_one_does_not():
    role = Role("rollout", build_with(ROLLOUT))
    assert specs_of(role.build) == {ROLLOUT.engine: SPEC}
    assert specs_of(built_when_used(role).build) == {ROLLOUT.engine: SPEC}
    assert specs_of(build_with(RolloutConfig())) == {}


def build_with(rollout):
    return partial(build_engine, model=Config().model, rollout=rollout)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (
            {"router_replay": True},
            r"router_replay=true: the engine of .*:OF_TEXTS records no routes \(EngineSpec\.",
        ),
        (
            {"tensor_parallel_size": 2},
            r"tensor_parallel_size=2: the engine of .*:OF_TEXTS is on one worker",
        ),
        (
            {"in_flight": True, "max_staleness": 1},
            r"in_flight=true: the engine of .*:OF_TEXTS takes no new weights while .*\.in_flight",
        ),
    ],
)
def test_what_an_engine_of_ones_own_cannot_do_is_refused(rollout, said, monkeypatch):
    monkeypatch.setattr("siirl_dask.rollout.preflight.read_routing", lambda path: None)
    rollout = RolloutConfig(engine=f"{__name__}:OF_TEXTS", **rollout)
    with pytest.raises(ConfigError, match=said):
        check_engine({"rollout": rollout}, ["0"], Config())


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ({"images": ImagesConfig(column="pictures")}, r"in_flight=true with images\.column=.*"),
        (
            {"lora": LoraConfig(rank=4), "engine": "vllm", "dtype": Dtype.bfloat16},
            r"in_flight=true with trainer\.lora\.rank=4: .*enable_lora: false",
        ),
        ({"lora": LoraConfig(rank=4), "base": ["a", "b"], "agent": "a"}, r"agents a, b have one"),
    ],
)
def test_rows_under_way_whose_weights_cannot_change_are_refused(role, said):
    own = dict(role)
    engine = own.pop("engine", "transformers")
    model = ModelConfig(path="no/model/here", dtype=own.pop("dtype", Dtype.float32))
    rollout = RolloutConfig(engine=engine, in_flight=True, max_staleness=1)
    with pytest.raises(ConfigError, match=said):
        check_engine({"model": model, "rollout": rollout, **own}, ["0"], Config())


def test_abilities_are_found_behind_an_object_that_is_built_when_it_is_used():
    lazy = built_when_used(Role("rollout", build_with(ROLLOUT))).build(Device("w0"), Rank())
    assert (processor_of(lazy), routing_of(lazy)) == ("a processor", "some routers")
    assert processor_of(object()) is None
    assert routing_of(object()) is None
