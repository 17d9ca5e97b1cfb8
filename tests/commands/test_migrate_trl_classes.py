"""``siirl-dask migrate`` of TRL scripts whose trainer is a class of their own, and whose rewards lie
elsewhere: what is code, and not read, is left to decide.
"""

from __future__ import annotations

import pytest

from siirl_dask.commands.migrate import migrate
from siirl_dask.commands.migrate.trl.script import read_trl_script
from siirl_dask.config.file import load
from siirl_dask.errors import ConfigError


def written(tmp_path, script):
    done = migrate([str(script)], 1000)
    path = tmp_path / "migrated.yaml"
    path.write_text(done.text)
    return path, done


DERIVED = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer{alias}
from my_rewards import share_of_digits

{classes}

ds = load_dataset("parquet", data_files="d.parquet")
MyTrainer(model="m", reward_funcs=share_of_digits, args=GRPOConfig(num_generations=4), train_dataset=ds).train()
"""


@pytest.mark.parametrize(
    "classes",
    [
        "class MyTrainer(GRPOTrainer):\n    pass",
        'class MyTrainer(GRPOTrainer):\n    """Mine."""\n\n    _tag_names = ["mine"]',
        "class MyTrainer(GRPOTrainer):\n    def log(self, logs):\n        print(logs)",
        "class Base(GRPOTrainer):\n    pass\n\nclass MyTrainer(Base):\n    pass",
        "class MyTrainer(GRPOTrainer):\n    def __init__(self, *args, extra=1, **kwargs):\n"
        "        super().__init__(*args, **kwargs)\n        self.extra = extra",
        "class MyTrainer(GRPOTrainer):\n    def __init__(self, model, reward_funcs, **kwargs):\n"
        "        super().__init__(model, reward_funcs=reward_funcs, **kwargs)",
    ],
)
def test_a_derived_trainer_that_changes_nothing_is_read_as_grpo_trainer(tmp_path, classes):
    text = DERIVED.format(alias="", classes=classes)
    found = read_trl_script(text, "x.py", {})
    assert found.undecided.keys() <= {"data.answer"}  # of a reward that is elsewhere
    assert found.values["num_generations"] == 4
    assert found.values["reward_funcs"] == ["my_rewards:share_of_digits"]


def test_grpo_trainer_by_another_name_is_read(tmp_path):
    found = read_trl_script(DERIVED.format(alias=" as MyTrainer", classes=""), "x.py", {})
    assert found.values["num_generations"] == 4


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ("    def compute_loss(self, model, inputs):\n        return 0", "algorithm.loss"),
        ("    def _compute_loss(self, model, inputs):\n        return 0", "algorithm.loss"),
        ("    def training_step(self, *args):\n        return 0", "algorithm.loss"),
        ("    _generate_and_score_completions = mine", "rollout.engine"),
        ("    async def _calculate_rewards(self, *args):\n        return 0", "rewards.function"),
        ("    def get_train_dataloader(self):\n        return 0", "data.url"),
        ("    def create_optimizer(self):\n        return 0", "trainer.lr"),
        (
            "    def __init__(self, *args, **kwargs):\n        super().__init__(*args, **kwargs)\n"
            "        self.num_generations = 2",
            "algorithm.loss",
        ),
        (
            "    def __init__(self, *args, **kwargs):\n        kwargs['args'].beta = 1\n"
            "        super().__init__(*args, **kwargs)",
            "algorithm.loss",
        ),
        (
            "    def __init__(self, reward_funcs, model, **kwargs):\n"
            "        super().__init__(model=model, reward_funcs=reward_funcs, **kwargs)",
            "algorithm.loss",
        ),
    ],
)
def test_what_a_derived_trainer_overrides_is_left_to_decide_and_stops_the_plan(tmp_path, body, key):
    path = tmp_path / "x.py"
    path.write_text(DERIVED.format(alias="", classes=f"class MyTrainer(GRPOTrainer):\n{body}"))
    target, done = written(tmp_path, path)
    assert f"TO DECIDE: {key}: MyTrainer." in done.report
    assert f"{key.partition('.')[2]}: ???  # TO DECIDE: MyTrainer." in done.text
    with pytest.raises(ConfigError, match=rf"{key}.*: a value is needed"):
        load(target, ["data.url=x"] if key != "data.url" else [])


def test_a_trainer_that_is_imported_leaves_its_loss_to_decide(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(DERIVED.format(alias="", classes="from elsewhere import MyTrainer"))
    done = written(tmp_path, path)[1]
    assert "loss: ???  # TO DECIDE: what MyTrainer changes of GRPOTrainer" in done.text
    assert "n: 4  # num_generations" in done.text


IMPORTED = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
{imports}

ds = load_dataset("parquet", data_files="d.parquet")
GRPOTrainer(model="m", reward_funcs={rewards}, args=GRPOConfig(num_generations=4), train_dataset=ds).train()
"""


def test_a_reward_that_reads_the_ids_of_completions_gets_them(tmp_path):
    """It had none where the argument has a default, and was refused where it has none."""
    (tmp_path / "mine.py").write_text(
        "def short(completions, completion_ids=None, **kwargs):\n    return [1.0]\n"
    )
    path = tmp_path / "x.py"
    path.write_text(IMPORTED.format(imports="from mine import short", rewards="short"))
    done = written(tmp_path, path)[1]
    assert "columns: [response_ids]" in done.text
    assert "answer: prompt  # " in done.text


@pytest.mark.parametrize(
    ("imports", "rewards"),
    [("from mine import right", "right"), ("import mine", "[mine.right]")],
)
def test_an_imported_reward_names_the_column_that_it_reads(tmp_path, imports, rewards):
    (tmp_path / "mine.py").write_text(
        "def right(completions, truth, level=None, **kwargs):\n    return [1.0]\n"
    )
    path = tmp_path / "x.py"
    path.write_text(IMPORTED.format(imports=imports, rewards=rewards))
    done = written(tmp_path, path)[1]
    assert "answer: truth  # " in done.text
    assert "columns: [level]" in done.text
    assert "answer_name: truth" in done.text


@pytest.mark.parametrize("source", [None, "from elsewhere import right\n", "def right(:\n"])
def test_a_reward_whose_code_is_not_there_leaves_the_answer_to_decide(tmp_path, source):
    if source is not None:
        (tmp_path / "mine.py").write_text(source)
    path = tmp_path / "x.py"
    path.write_text(IMPORTED.format(imports="from mine import right", rewards="right"))
    done = written(tmp_path, path)[1]
    assert "answer: ???  # TO DECIDE: the code of right is not beside the script" in done.text


def test_rewards_in_a_script_that_trains_say_what_to_write(tmp_path):
    path = tmp_path / "x.py"
    functions = "def right(completions, answer, **k):\n    return [1.0]\n\n"
    functions += "def short(completions, **k):\n    return [1.0]\n"
    path.write_text(IMPORTED.format(imports=functions, rewards="[right, short]"))
    done = written(tmp_path, path)[1]
    assert "function: siirl_dask.rewards:from_trl" in done.text.replace('"', "")
    assert "options: ???  # TO DECIDE: importing the script trains" in done.text
    assert "{functions: [YOUR_FILE.py:right, YOUR_FILE.py:short]}" in done.text
    assert "is not known" not in done.report


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ("class B(MyTrainer, GRPOTrainer):\n    pass\n\nclass MyTrainer(B):\n    pass", ""),
        (
            "class GRPOTrainer(GRPOTrainer):\n    def compute_loss(self):\n        return 0\n\n"
            "class MyTrainer(GRPOTrainer):\n    pass",
            "GRPOTrainer.compute_loss",
        ),
    ],
)
def test_classes_that_are_derived_in_a_circle_end(classes, said):
    found = read_trl_script(DERIVED.format(alias="", classes=classes), "x.py", {})
    assert said in found.undecided.get("algorithm.loss", "")


def test_another_trainer_of_trls_is_none_of_grpo():
    text = DERIVED.format(alias=", RLOOTrainer as MyTrainer", classes="")
    with pytest.raises(ConfigError, match="no GRPOTrainer"):
        read_trl_script(text, "x.py", {})
