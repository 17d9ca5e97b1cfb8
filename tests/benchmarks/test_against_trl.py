"""Tests of the comparison with TRL, as far as they can run without TRL."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from siirl_storage import open_table

from benchmarks.against_trl.cases import cases
from benchmarks.against_trl.page import write_page
from benchmarks.against_trl.real_setting import RealSetting
from benchmarks.against_trl.rows import Rows, packed, padded
from benchmarks.against_trl.run_ours import overrides, run_ours
from benchmarks.against_trl.setting import Curves, Setting, prompts_in_order
from benchmarks.against_trl.update import apart, distance, is_equal, make_trainer, our_update
from siirl_dask.config import TrainerConfig
from siirl_dask.config.file import load_config_file
from siirl_dask.tasks.sorting import write_digits_task
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import load_model

REAL_MODEL = Path(__file__).parents[2] / "benchmarks" / "real_model.yaml"
PAD = 256
ROWS = Rows(
    prompts=[[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]],
    responses=[[1, 2, 3, 4], [5, 6], [7], [8, 9, 10, 11, 12, 13]],
    advantages=torch.tensor([1.0, -0.5, 2.0, 0.3]),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "model", seed=3)


@pytest.fixture(scope="module")
def rows(model):
    """With the log-probs of the model, so that no ratio is clipped."""
    unknown = [torch.zeros(length) for length in ROWS.lengths]
    given = replace(ROWS, old_logprobs=unknown, reference_logprobs=unknown)
    scores = make_trainer(model, TrainerConfig()).logprobs(packed(given).rows).logprobs
    return replace(
        given,
        old_logprobs=scores.split(ROWS.lengths),
        reference_logprobs=scores.split(ROWS.lengths),
    )


def grpo_of_padded(model, rows):
    """The loss ``grpo`` and its gradient, from the layout that TRL is handed, by a plain forward
    pass.
    """
    network, given = load_model(model), padded(rows, PAD)
    attended = torch.cat([given["prompt_mask"], given["completion_mask"]], 1)
    positions = (attended.cumsum(1) - 1).clamp(min=0)
    tokens = torch.cat([given["prompt_ids"], given["completion_ids"]], 1)
    output = network(tokens, attention_mask=attended, position_ids=positions, use_cache=False)
    width = given["completion_ids"].shape[1]
    scores = output.logits[:, -width - 1 : -1].log_softmax(-1)
    logprobs = scores.gather(2, given["completion_ids"][..., None]).squeeze(2)
    terms = (
        -given["advantages"][:, None]
        * (logprobs - given["old_per_token_logps"]).exp()
        * given["completion_mask"]
    )
    loss = (terms.sum(1) / given["completion_mask"].sum(1)).mean()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in network.named_parameters()}


def test_an_update_of_packed_rows_is_that_of_the_padded_ones(model, rows):
    (grpo,) = (case for case in cases() if case.name == "grpo")
    found = apart(our_update(grpo, model, rows), grpo_of_padded(model, rows))
    assert is_equal(found), found


def test_updates_of_other_rows_or_other_losses_are_not_called_equal(model, rows):
    grpo, dapo = (case for case in cases() if case.name in ("grpo", "dapo"))
    found = our_update(grpo, model, rows)
    assert not is_equal(apart(our_update(dapo, model, rows), found))
    assert not is_equal(apart(our_update(grpo, model, rows.first(3)), found))
    loss, gradient = found
    assert not is_equal(
        apart((loss, {name: 1.0001 * values for name, values in gradient.items()}), found)
    )


def test_a_parameter_that_one_side_lacks_is_named():
    with pytest.raises(ValueError, match="'head'"):
        distance({"body": torch.ones(2)}, {"body": torch.ones(2), "head": torch.ones(2)})


def test_trl_is_given_the_prompts_of_our_run_in_its_order(tmp_path):
    write_digits_task(tmp_path)
    setting = Setting(
        folder=str(tmp_path), steps=2, prompts=6, samples=2, minibatches=2, seed=5, validate=False
    )
    curves = run_ours(setting, str(tmp_path / "run"))
    drawn = open_table(str(tmp_path / "run" / "rollouts")).to_table(["step", "row_id", "prompt"])
    rows = sorted(drawn.to_pylist(), key=lambda row: (row["step"], row["row_id"]))
    expected = [row["prompt"] for row in prompts_in_order(setting) for _ in range(setting.samples)]
    assert [row["prompt"] for row in rows] == expected
    assert [len(curves.rewards), len(curves.entropy), len(curves.ends), len(curves.accuracy)] == [
        2,
        2,
        2,
        0,
    ]
    assert curves.samples_per_second(setting.rows, 1) == pytest.approx(
        12 / (curves.ends[1] - curves.ends[0])
    )


def test_the_page_names_losses_that_differ_without_a_reason(tmp_path):
    def case(name, equal, differs):
        numbers = {"loss": 0.5, "loss_trl": 0.5, "loss_apart": 0.0, "gradient_apart": 0.1}
        return {"case": name, "ours": "x", "differs": differs, **numbers, "equal": equal}

    advantages = {"grpo": 1e-3, "grpo_with_trls_epsilon": 0.0, "dr_grpo": 0.0}
    found = {
        "rows": 4,
        "tokens": 9,
        "cases": [
            case("a", True, ""),
            case("b", False, ""),
            case("c", False, "it is another mean"),
        ],
        "advantages": advantages,
    }
    run = {
        "rewards": [0.1, 0.2],
        "entropy": [0.5, 0.4],
        "ends": [1.0, 2.0],
        "accuracy": [0.25, 0.75],
    }
    speeds = {
        "samples_per_second": {"ours": [90.0], "trl": [100.0]},
        "medians": {"ours": 90.0, "trl": 100.0},
    }
    timed = {**speeds, "ratio": 0.9, "steps": 5, "loads": [0.1]}
    around = {
        "command": "python x.py",
        "machine": "a machine",
        "versions": "1",
        "day": "today",
        "load": 0.1,
    }
    found_by_part = {"losses": found, "curves": {"ours": [run], "trl": [run]}, "speed": timed}
    found_by_part["speed of 4 workers"] = {
        **timed,
        "medians": {"ours": 150.0, "trl": 100.0},
        "ratio": 1.5,
    }
    parts = {part: {**around, "found": values} for part, values in found_by_part.items()}
    write_page(tmp_path / "page.md", tmp_path / "results" / "record.json", parts)
    page = (tmp_path / "page.md").read_text()
    assert "1 of 2 loss configurations" in page
    assert "no: and it should be" in page
    assert "no: it is another mean" in page
    assert "samples per second, one worker, one core: ours 90, trl 100, ratio 0.90" in page
    assert (
        "two workers that generate and two that learn, two cores: ours 150, trl 100, ratio 1.50"
        in page
    )
    assert json.loads((tmp_path / "results" / "record.json").read_text()) == parts
    assert (tmp_path / "page.png").stat().st_size > 0


def test_steps_that_warm_up_are_not_timed():
    curves = Curves(rewards=[], entropy=[], ends=[10.0, 11.0, 13.0, 15.0], accuracy=[])
    assert curves.samples_per_second(rows=8, skip=2) == pytest.approx(8 * 2 / 4.0)


def test_a_real_models_run_has_the_settings_that_its_page_says(digits_task, tmp_path):
    """On a small model: two workers, one optimizer step a step, old log-probs of the engine."""
    setting = RealSetting(
        folder=str(digits_task.train.parent), steps=1, max_prompt=32, validate=False
    )
    assert setting.task.model == digits_task.model
    values = overrides(setting, str(tmp_path / "run"))
    config = load_config_file(
        REAL_MODEL, [f"{key}={value}" for key, value in values.items()]
    ).config
    assert (config.cluster.workers, config.data.batch_size, config.rollout.n) == (2, 8, 8)
    assert (
        config.algorithm.minibatches,
        config.rollout.max_response_length,
        config.trainer.lr,
    ) == (1, 16, 1e-5)
    assert config.algorithm.old_logprobs == "siirl_dask.nodes:rollout_logprobs"
