"""``siirl-dask migrate`` of the reward in a configuration of verl: its own functions are used
unchanged, and none is guessed.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from siirl_dask.cli import main
from siirl_dask.commands.migrate import migrate
from siirl_dask.config.file import load, load_config_file
from siirl_dask.driver.phases import dags, validation_of
from siirl_dask.errors import ConfigError

OWN = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):\n"
    "    assert data_source == 'mine/sums' and extra_info['index'] >= 0\n"
    "    return {'score': scale * len(solution_str) / 100, 'pred': solution_str}\n"
)
EXACT = "siirl_dask.rewards:exact_match"


@pytest.fixture
def options(tmp_path, monkeypatch, digits_task):
    """Return options of a script over a table in verl's layout, in a folder with a reward."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN)
    rows = {
        "data_source": ["mine/sums"] * 8,
        "prompt": ["1 2", "3 1"] * 4,
        "reward_model": [{"style": "rule", "ground_truth": "1"}] * 8,
        "extra_info": [{"index": number} for number in range(8)],
    }
    pq.write_table(pa.table(rows), "rows.parquet")
    return [
        "algorithm.adv_estimator=grpo",
        "data.train_files=rows.parquet",
        "data.val_files=rows.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=32",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={digits_task.model}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.total_training_steps=2",
    ]


@pytest.mark.parametrize("group", ["custom_reward_function", "reward.custom_reward_function"])
def test_a_reward_of_ones_own_scores_training_and_validation(
    group, options, capsys, cluster_address
):
    own = [f"{group}.path=mine.py", f"{group}.reward_kwargs.scale=0.5"]
    done = migrate([*options, *own])
    assert not [name for name, fate in done.fates.items() if fate.lost and group in name]
    Path("mine.yaml").write_text(done.text)
    read = load_config_file("mine.yaml")
    assert read.config.rewards.function == "siirl_dask.rewards:from_verl"
    assert read.config.rewards.options["arguments"] == {"scale": 0.5}
    training, spelled = dags(read)
    for dag in (training, validation_of(read.config, training, spelled)):
        assert [*dag.node("reward").options["columns"]] == ["data_source", "extra_info"]
    here = ["rollout.engine=transformers", "model.dtype=float32", "trainer.backend=torch"]
    here += ["observe.plot=false", "run.url=run", f"cluster.address={cluster_address}"]
    main(["run", "mine.yaml", *here])
    assert "step 2/2" in capsys.readouterr().out


def test_a_path_of_a_reward_that_comes_first_is_no_script_of_trls(options):
    for first in ("custom_reward_function.path=mine.py", "+custom_reward_function.path=a/mine.py"):
        assert "from_verl" in migrate([first, *options]).text


def test_columns_that_the_function_or_the_data_lack_are_not_passed(options):
    Path("mine.py").write_text("def f(data_source, solution_str, ground_truth):\n    return 1.0\n")
    own = ["custom_reward_function.path=mine.py", "custom_reward_function.name=f"]
    assert "reward: {with: {columns: [data_source]}}" in migrate([*options, *own]).text
    table = pq.read_table("rows.parquet").drop_columns(["data_source"])
    pq.write_table(table, "rows.parquet")
    assert "columns" not in migrate([*options, *own]).text
    Path("mine.py").write_text("def f(solution_str, ground_truth, **more):\n    return 1.0\n")
    assert "columns: [extra_info]" in migrate([*options, *own]).text


def test_dynamic_sampling_scores_in_its_own_node(options):
    more = ["custom_reward_function.path=mine.py", "algorithm.filter_groups.enable=True"]
    text = migrate([*options, *more, "reward_model.overlong_buffer.enable=True"]).text
    assert "rounds: 10, columns: [data_source, extra_info]" in text
    assert "reward: {with: {buffer: 512" in text


def test_a_function_of_batches_is_left_to_decide(options):
    own = ["custom_reward_function.path=mine.py", "reward_model.reward_manager=batch"]
    text = migrate([*options, *own]).text
    assert "function: ???  # TO DECIDE: mine.py:compute_score takes the rows of a batch" in text


def test_a_dataset_whose_reward_nothing_tells_stops_the_plan(options):
    done = migrate(options)
    Path("mine.yaml").write_text(done.text)
    with pytest.raises(ConfigError, match=r"rewards\.function: a value is needed"):
        load("mine.yaml")
    assert load("mine.yaml", [f"rewards.function={EXACT}"]).rewards.function == EXACT


@pytest.mark.parametrize(
    ("source", "function"),
    [("openai/gsm8k", "gsm8k"), ("math_dapo", "dapo_math"), ("lighteval/MATH", "math_answer")],
)
def test_the_source_in_the_rows_tells_the_reward(source, function, options):
    table = pq.read_table("rows.parquet")
    column = pa.array([source] * table.num_rows)
    pq.write_table(table.set_column(0, "data_source", column), "rows.parquet")
    assert f'function: "siirl_dask.rewards:{function}"' in migrate(options).text


@pytest.mark.parametrize(
    "module",
    ["verl.trainer.sft_trainer", "verl.trainer.fsdp_sft_trainer", "verl.trainer.main_eval"],
)
def test_a_program_of_verls_that_is_no_reinforcement_learning_is_refused(module, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m {module} data.train_files=x.parquet trainer.nnodes=1\n")
    with pytest.raises(ConfigError, match=rf"it calls {module}, which is no reinforcement"):
        migrate([str(script)])


def test_a_number_that_is_none_is_left_to_decide_with_what_follows_from_it(options):
    done = migrate([*options, "actor_rollout_ref.rollout.n=eight", "trainer.nnodes=two"])
    assert "n: ???  # TO DECIDE: actor_rollout_ref.rollout.n is 'eight', which is no n" in done.text
    assert "workers: ???  # TO DECIDE: trainer.nnodes is 'two', which is no number" in done.text


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_a_training_file_that_cannot_be_read_is_named(content, options):
    Path("rows.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=r"training file 'rows\.parquet' cannot be read: Parquet"):
        migrate(options)
