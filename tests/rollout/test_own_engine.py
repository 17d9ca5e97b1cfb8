"""An engine of one's own, which is that of docs/engines.md: it passes the suite, runs on
workers, and is checked.
"""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from siirl_dask.cli import main
from siirl_dask.config import Dtype, ModelConfig, RolloutConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Device, Rank
from siirl_dask.driver.checks.preflight import check
from siirl_dask.driver.phases import dags, plan_phases, worker_names
from siirl_dask.rollout import EngineInputs
from siirl_dask.testing.engines import EngineTests
from tests.conftest import digits_overrides

DOCS = Path(__file__).parents[2] / "docs" / "engines.md"
OWN = "rollout.engine=my_engine:SPEC"


def example():
    """The module that the page shows."""
    (code,) = re.findall(r"```python\n(# my_engine\.py\n.*?)```", DOCS.read_text(), re.DOTALL)
    return code


@pytest.fixture
def my_engine(tmp_path, monkeypatch):
    """The module, beside which the command is run; forgotten later."""
    (tmp_path / "my_engine.py").write_text(f"{example()}\nOTHER = {{}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_engine", None)


class TestTheEngineOfThePage(EngineTests):
    @classmethod
    def make_engine(cls, folder):
        module = ModuleType("engine_of_the_page")
        exec(example(), vars(module))
        model = ModelConfig(path=str(folder), dtype=Dtype.float32)
        inputs = EngineInputs(
            model=model, rollout=RolloutConfig(), device=Device("w0"), rank=Rank()
        )
        return module.SPEC.build(inputs)


def test_a_run_samples_with_it_on_workers_that_do_not_have_its_module(my_engine, train):
    own = train("own", OWN, "rollout.engine_options={rows: 3}", "run.steps=2")
    shipped_one = train("shipped", "rollout.engine=transformers", "run.steps=2")
    for step in (1, 2):
        tables = [
            run.table("rollouts", step).select(["row_id", "response_ids"])
            for run in (own, shipped_one)
        ]
        assert tables[0].equals(tables[1])
    assert own.table("rollouts", 2)["weights_version"].unique().to_pylist() == [1], (
        "it has loaded new weights"
    )
    role = json.loads((own.url / "dag.json").read_text())["roles"]["rollout"]
    assert role["with"]["rollout"]["engine"] == "my_engine:SPEC"
    assert "engine" not in role["with"], "what travels to the workers is no option of the DAG"


def refusal(capsys, task, url, *overrides):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(shipped("quickstart.yaml")), *digits_overrides(task, url), *overrides])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([OWN, "rollout.engine_options={row: 3}"], "engine_options.row: expected rows"),
        ([OWN, "rollout.engine_options={rows: 0}"], "engine_options.rows=0: expected at least 1"),
        (
            ["rollout.engine=my_engine:SPEK"],
            "'my_engine:SPEK': module 'my_engine' has no EngineSpec 'SPEK'",
        ),
        (["rollout.engine=my_engine.py:SPEK"], "file 'my_engine.py' has no EngineSpec 'SPEK'"),
        (
            ["rollout.engine=my_engin:SPEC"],
            "'my_engin:SPEC': there is no module 'my_engin' on the Python path",
        ),
        (["rollout.engine=my_engine:OTHER"], "has no EngineSpec 'OTHER', which is of type dict"),
        (["rollout.engine=tranformers"], "did you mean 'transformers'"),
        ([OWN, "rollout.vllm.max_num_seqs=3"], "rollout.vllm.max_num_seqs=3: only vLLM reads this"),
        ([OWN, "rollout.sampler=vllm"], "rollout.sampler=vllm: it is part of vLLM"),
        ([OWN, "rollout.sampler=sglang"], "rollout.sampler=sglang: it is part of SGLang"),
        (
            [OWN, "trainer.lora.rank=4"],
            "trainer.lora.rank=4: the engine of rollout.engine=my_engine:SPEC takes whole",
        ),
        (
            [OWN, "rollout.tensor_parallel_size=2"],
            "rollout.tensor_parallel_size=2: the engine of .* is on one worker",
        ),
        (
            ["rollout.engine_options={rows: 3}"],
            "engine_options={'rows': 3}: they are for an engine of your own",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_by_plan_in_a_line(
    my_engine, capsys, digits_task, tmp_path, overrides, said
):
    line = refusal(capsys, digits_task, tmp_path / "run", *overrides)
    assert line.startswith("error: ")
    assert re.search(said, line), line


@pytest.mark.parametrize("name", ["my_engine:SPEK", "my_engin:SPEC"])
def test_the_nearest_spelling_is_proposed(my_engine, capsys, digits_task, tmp_path, name):
    line = refusal(capsys, digits_task, tmp_path / "run", f"rollout.engine={name}")
    assert re.search("did you mean '(SPEC|my_engine)'", line), line


def test_the_plan_is_told_in_text_and_as_json(my_engine, capsys, digits_task, tmp_path):
    given = [str(shipped("quickstart.yaml")), *digits_overrides(digits_task, tmp_path / "run"), OWN]
    main(["plan", *given])
    assert "rollout" in capsys.readouterr().out
    main(["plan", *given, "--format", "json"])
    assert json.loads(capsys.readouterr().out)


LIKE_VLLM = """
from dataclasses import replace

from siirl_dask.rollout import Abilities, EngineSpec
from siirl_dask.rollout.vllm_engine.spec import SPEC as VLLM


def build(inputs):
    raise NotImplementedError


SPEC = EngineSpec(name="like vLLM", build=build, memory=VLLM.memory, facts=VLLM.facts)
RANKS = replace(SPEC, abilities=Abilities(tensor_parallel=True))
"""


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("like_vllm.py:SPEC", []),
        ("like_vllm.py:RANKS", ["rollout.tensor_parallel_size=2"]),
        ("vllm", ["rollout.vllm.max_num_batched_tokens=4096", "rollout.tensor_parallel_size=2"]),
    ],
)
def test_an_engine_with_the_memory_of_vllm_is_planned_and_proposed_what_it_takes(
    digits_task, tmp_path, monkeypatch, capsys, engine, more
):
    """Each setting that would need less memory is one that the plan accepts."""
    (tmp_path / "like_vllm.py").write_text(LIKE_VLLM)
    monkeypatch.chdir(tmp_path)
    given = [*digits_overrides(digits_task, tmp_path / "run"), f"rollout.engine={engine}"]
    given += ["model.dtype=float32", "rollout.max_rows=256"]
    main(["plan", str(shipped("quickstart.yaml")), *given, "--device-memory=24GB"])
    assert "sampler" in capsys.readouterr().out
    proposed = remedies(given)
    assert proposed == [*more[:-1], "rollout.max_rows=64", "model.dtype=bfloat16", *more[-1:]]
    remedies([*given, *proposed])


def remedies(overrides):
    """Settings that would need less memory than these."""
    file = load_config_file(shipped("quickstart.yaml"), overrides)
    phases = plan_phases(file.config, *dags(file), worker_names(file.config), assume_columns=True)
    footprint = check(file.config, phases).footprints["rollout"]
    return [remedy.setting for remedy in footprint.remedies]
