"""Models of which vLLM computes other log-probs than the trainer are refused, and it still does
compute others.
"""

import json
from dataclasses import replace

import pytest

from siirl_dask.cli import main
from siirl_dask.devices import DeviceKind
from siirl_dask.errors import ConfigError
from siirl_dask.rollout.vllm_engine.other_logprobs import check_logprobs_of_vllm
from siirl_dask.testing.reference_model import assert_agrees_with_trainer
from tests.training import families

WIDTHS = {"head_dim": 32, "moe_intermediate_size": 64}
"""vLLM's kernels for CPUs take no narrower ones."""


def a_config(folder, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"model_type": "lfm2_moe"},
            "lfm2_moe than transformers.*take rollout.engine=transformers",
        ),
        ({"model_type": "ernie4_5_moe"}, "on a CPU computes other log-probs of ernie4_5_moe"),
        (
            {"model_type": "cohere2", "sliding_window": 99},
            "windows of 99 tokens.* is 100, expected at most 99",
        ),
        (
            {"model_type": "qwen2_moe", "sliding_window": 99, "use_sliding_window": True},
            "computes the whole row",
        ),
    ],
)
def test_a_model_of_which_vllm_computes_other_logprobs_is_refused_by_name(settings, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        check_logprobs_of_vllm(a_config(tmp_path, **settings), 100, DeviceKind.CPU)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "qwen2", "sliding_window": 9},
        {"model_type": "cohere2", "sliding_window": 100},
        {"model_type": "cohere2", "sliding_window": None},
        {"model_type": "qwen2_moe", "sliding_window": 9},
        {"model_type": "qwen2_moe", "sliding_window": 9, "use_sliding_window": False},
        {"model_type": "ernie4_5_moe"},
    ],
)
def test_a_model_whose_rows_vllm_computes_alike_is_not_refused(settings, tmp_path):
    check_logprobs_of_vllm(a_config(tmp_path, **settings), 100, DeviceKind.CUDA)


def test_plan_refuses_it_for_vllm_alone(capsys, tmp_path, digits_task):
    model = a_config(tmp_path / "model", model_type="lfm2_moe")
    words = [
        "plan",
        "configs/quickstart.yaml",
        f"model.path={model}",
        f"data.url={digits_task.train}",
    ]
    with pytest.raises(SystemExit):
        main([*words, "rollout.engine=vllm"])
    assert "vLLM computes other log-probs of lfm2_moe" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # this folder has no weights
        main([*words, "rollout.engine=transformers"])
    assert "vLLM" not in capsys.readouterr().err


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["lfm2_moe", "ernie4_5_moe", "cohere2", "qwen2_moe"])
def test_vllm_still_computes_others_and_the_same_of_rows_within_a_window(
    family, monkeypatch, tmp_path
):
    """Where this fails, vLLM has been mended: the family leaves the table."""
    pytest.importorskip("vllm")
    from siirl_dask.rollout.vllm_engine import engine as vllm_engine
    from tests.rollout.test_vllm_engine import running

    monkeypatch.setattr(vllm_engine, "check_logprobs_of_vllm", lambda *model: None)
    monkeypatch.setitem(families.SIZES, "hidden_size", 128)
    monkeypatch.setitem(families.SIZES, "intermediate_size", 128)
    tried = families.FAMILIES[family]
    settings = {name: WIDTHS.get(name, value) for name, value in tried.settings.items()}

    def agrees(name, settings):
        monkeypatch.setitem(families.FAMILIES, family, replace(tried, settings=settings))
        folder = tmp_path / name
        folder.mkdir()
        families.written(folder, family)
        with running(folder) as engine:
            assert_agrees_with_trainer(engine, folder, after=(0,))

    with pytest.raises(AssertionError, match="not close"):
        agrees("other", settings)
    if "sliding_window" in settings:
        agrees("same", {**settings, "sliding_window": 1024})
