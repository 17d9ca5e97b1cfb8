"""The scripts in pipelines/ run, and spell the same DAG as the YAML."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask import grpo, ppo, turns
from siirl_dask.cli import main
from siirl_dask.config import ENGINES_LOGPROBS
from siirl_dask.config.file import load, load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.planner.contract import bare
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from tests.conftest import digits_overrides
from tests.forked_programs import run_forked
from tests.images.pictures import png
from tests.recipes.keys import OTHER_VALUES, check_no_key_is_ignored, same_dag

PIPELINES = Path(__file__).parents[2] / "pipelines"
DOCS = PIPELINES.parent / "docs"


def script(name):
    spec = importlib.util.spec_from_file_location(name, PIPELINES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = {
    "agents": "quickstart_agents",
    "grpo": "quickstart",
    "ppo": "quickstart_ppo",
    "dapo": "quickstart_dapo",
    "custom": "quickstart",
    "from_scratch": "quickstart",
    "openai_agent": "quickstart",
    "turns": "quickstart_turns",
    "vlm": "quickstart_vlm",
}
"""Each with the config that its first lines name."""
LONGEST = {
    "agents": 50, "grpo": 20, "ppo": 20, "dapo": 20, "custom": 50, "from_scratch": 70, "turns": 50, "openai_agent": 50,
    "vlm": 50,
}  # fmt: skip
"""Lines of each: what does not fit belongs into the package."""
ITS_OWN = {"openai_agent": ["rollout.max_response_length=64"]}
"""Values that the first lines of a script set."""


@pytest.mark.parametrize(
    ("name", "recipe"), [("dapo", None), ("grpo", grpo), ("ppo", ppo), ("turns", turns)]
)
def test_a_script_trains_the_dag_that_its_config_spells(name, recipe):
    file = load_config_file(shipped(SCRIPTS[name]))
    assert same_dag(recipe or script(name).training)(file)


def test_the_agents_page_spells_the_dag_of_the_script(tmp_path):
    text = re.search(
        r"```yaml\n(base: quickstart.yaml.*?)```", (DOCS / "endpoint.md").read_text(), re.DOTALL
    )[1]
    path = tmp_path / "mine.yaml"
    text = text.replace("quickstart.yaml", str(shipped("quickstart.yaml")))
    path.write_text(text.replace("mine.py", str(PIPELINES / "openai_agent.py")))
    file = load_config_file(path)
    spelled, made = dags(file)[0], script("openai_agent").training(file.config)
    for node, other in zip(spelled.ordered(), made.ordered(), strict=True):
        names = [
            (one.name, bare(one.fn), one.role, one.after, one.rows, one.save_as, {*one.options})
            for one in (node, other)
        ]
        assert names[0] == names[1]
    assert spelled.node("rollout").options["agent"].__name__ == "agent"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_fits_its_page(name):
    assert len((PIPELINES / f"{name}.py").read_text().splitlines()) < LONGEST[name]


REFUSED = {
    "dapo": (),
    "custom": ("advantage", "advantage_options", "loss", "loss_options"),
    "from_scratch": set(OTHER_VALUES) - {"minibatches"},
}
"""Keys of the algorithm that a script refuses, since it says itself what they would."""


@pytest.mark.parametrize("name", REFUSED)
def test_no_key_of_the_algorithm_is_ignored_by_a_script(name):
    check_no_key_is_ignored(script(name).training, load(shipped(SCRIPTS[name])), REFUSED[name])


def test_every_script_is_run_here_or_in_a_file_of_its_name():
    others = {path.stem for path in PIPELINES.glob("*.py")} - set(SCRIPTS)
    assert others == {"select_prompts"}
    assert all((Path(__file__).parent / f"test_{name}.py").is_file() for name in others)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name in ("agents", "dapo", "ppo", "turns") else ()
        )
        for name in SCRIPTS
        if name != "vlm"
    ],
)
def test_the_script_runs_as_its_first_lines_say(name, digits_task, cluster_address, tmp_path):
    command = [PIPELINES / f"{name}.py", shipped(SCRIPTS[name])]
    settings = [
        "cluster.workers=1",
        "cluster.placement={}",
        "run.steps=1",
        f"cluster.address={cluster_address}",
    ]
    settings += [f"agents.b.model.path={digits_task.model}"] if name == "agents" else []
    settings += [*digits_overrides(digits_task, tmp_path / "run"), *ITS_OWN.get(name, [])]
    done = run_forked(*command, *settings, folder=tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run" / "rollouts" / "step=000001").glob("part-*"))) == 1


@pytest.mark.parametrize("way", ["file", pytest.param("stdin", marks=pytest.mark.slow)])
def test_the_snippet_of_the_readme_runs_without_a_guard_of_its_main_module(
    way, digits_task, tmp_path
):
    """Each worker called ``run`` once more, and the error after two minutes was about another
    thing.
    """
    page = (DOCS.parent / "README.md").read_text()
    text = re.search(r"```python\n(from siirl_dask import .*?)```", page, re.DOTALL)[1]
    url = tmp_path / "runs" / "mine"
    settings = [
        *digits_overrides(digits_task, url),
        "cluster.workers=1",
        "cluster.placement={}",
        "run.steps=1",
    ]
    text = text.replace("configs/quickstart.yaml", str(shipped("quickstart.yaml"))).replace(
        "runs/mine", str(url)
    )
    text = text.replace('"run.name=mine"]', f'"run.name=mine", *{settings}]')
    assert "__name__" not in text
    assert text.count(str(url)) == 2
    (tmp_path / "snippet.py").write_text(f"{text}print('one process ran this')\n")
    command = [sys.executable, "snippet.py" if way == "file" else "-"]
    given = None if way == "file" else (tmp_path / "snippet.py").read_text()
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, cwd=tmp_path, timeout=170
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("one process ran this") == 1
    assert "step: [[1]]" in done.stdout


@pytest.mark.slow
def test_the_script_of_images_runs_as_its_first_lines_say(tmp_path):
    images = pa.array([[{"bytes": png(16, 16), "path": None}]] * 8)
    rows = {"prompt": [f"<image>{at}?" for at in range(8)], "answer": ["3"] * 8, "images": images}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    settings = [
        f"data.url={tmp_path / 'rows.parquet'}",
        f"model.path={tiny_vlm(tmp_path / 'model')}",
        "run.steps=1",
    ]
    settings += [
        f"validation.url={tmp_path / 'rows.parquet'}",
        "validation.every=1",
        "validation.test_url=null",
        "data.prepare=null",
        "data.batch_size=8",
    ]
    settings += [
        f"run.url={tmp_path / 'run'}",
        "rollout.engine=transformers",
        "observe.progress=false",
    ]
    settings += ["trainer.warmup_steps=0"]
    command = [PIPELINES / "vlm.py", shipped("quickstart_vlm.yaml"), *settings]
    done = run_forked(*command, folder=tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'step': 1" in done.stdout
    assert pq.read_table(tmp_path / "run" / "rollouts" / "step=000001").num_rows == 64
    assert pq.read_table(tmp_path / "run" / "validation" / "step=000001").num_rows == 8


BROUGHT = {"grpo_gsm8k.yaml", "grpo_geometry3k.yaml"}
"""Configs for data that is not made on the spot."""
SHIPPED = {path.name for path in shipped("quickstart.yaml").parent.glob("*.yaml")}


def check_plan(said, edge="rollout -> old_logprobs"):
    for word in (edge, "The chain of each worker", "validation", "kB", "local"):
        assert word in said


@pytest.mark.parametrize("config", sorted(SHIPPED - BROUGHT))
def test_plan_describes_every_shipped_config_and_starts_nothing(
    config, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    main(["plan", str(shipped(config))])
    of_agents = config in ("quickstart_agents.yaml", "quickstart_marft.yaml")
    check_plan(capsys.readouterr().out, *(["turns_b -> old_logprobs_b"] if of_agents else []))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", sorted(BROUGHT))
def test_configurations_for_gpus_do_without_a_pass_for_old_log_probs(config):
    assert load_config_file(shipped(config)).config.algorithm.old_logprobs == ENGINES_LOGPROBS


def test_the_config_for_gsm8k_plans_and_runs_on_rows_as_its_first_lines_say(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}assistant:"
    tiny_model(
        tmp_path / "models" / "Qwen2.5-0.5B-Instruct", family="qwen2", chat_template=template
    )
    rows = [{"question": f"{at} + 1?", "answer": f"one more\n#### {at + 1}"} for at in range(8)]
    for name in ("train", "test"):
        path = tmp_path / "hub" / "main" / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    main(["plan", str(shipped("grpo_gsm8k.yaml"))])
    assert not (tmp_path / "data").exists()
    check_plan(capsys.readouterr().out)
    small = [
        "cluster.workers=2",
        "data.batch_size=4",
        "rollout.n=2",
        "rollout.max_response_length=4",
        "run.steps=1",
    ]
    small += ["data.prepare_options={source: hub}"]
    small += ["rollout.engine=transformers", "algorithm.minibatches=1"]
    main(["run", str(shipped("grpo_gsm8k.yaml")), *small, "run.url=run", "observe.progress=false"])
    rollouts = pq.read_table(tmp_path / "run" / "rollouts" / "step=000001")
    assert rollouts.num_rows == 8
    assert set(rollouts["answer"].to_pylist()) <= {str(at + 1) for at in range(8)}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_config_for_geometry3k_plans_and_runs_on_rows_as_its_first_lines_say(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tiny_vlm(tmp_path / "models" / "Qwen2.5-VL-3B-Instruct")
    entry = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    images = pa.array([[{"bytes": png(16 + at, 24, at), "path": None}] for at in range(8)], entry)
    rows = {
        "images": images,
        "problem": [f"<image>Find {at}." for at in range(8)],
        "answer": [*map(str, range(8))],
    }
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for split in ("train", "validation", "test"):
        pq.write_table(
            pa.table(rows), tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet"
        )
    main(["plan", str(shipped("grpo_geometry3k.yaml"))])
    assert not (tmp_path / "data").exists()
    check_plan(capsys.readouterr().out)
    small = [
        "cluster.workers=2",
        "data.batch_size=4",
        "rollout.n=2",
        "rollout.max_response_length=4",
        "run.steps=1",
    ]
    small += [
        "data.prepare_options={source: hub}",
        "rollout.engine=transformers",
        "algorithm.minibatches=1",
    ]
    main(
        [
            "run",
            str(shipped("grpo_geometry3k.yaml")),
            *small,
            "run.url=run",
            "observe.progress=false",
        ]
    )
    rollouts = pq.read_table(tmp_path / "run" / "rollouts" / "step=000001")
    assert rollouts.num_rows == 8
    assert all("<|image_pad|>Find" not in text for text in rollouts["prompt_text"].to_pylist())
    assert all("<|vision_end|>Find" in text for text in rollouts["prompt_text"].to_pylist())
