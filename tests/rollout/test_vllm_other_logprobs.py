"""Models of which vLLM computes other log-probs than the trainer are refused, and it still does
compute others.
"""

import json
import re
from pathlib import Path

import pytest

from siirl_dask.cli import main
from siirl_dask.devices import DeviceKind
from siirl_dask.errors import ConfigError
from siirl_dask.rollout.vllm_engine.other_logprobs import (
    FAILS_ON_CPU,
    OTHER_LOGPROBS,
    OTHER_LOGPROBS_ON_CPU,
    OTHER_WINDOWS,
    check_logprobs_of_vllm,
)
from siirl_dask.testing.reference_model import assert_agrees_with_trainer
from tests.rollout.vllm_families import EQUAL, REFUSED, written_for_vllm
from tests.training import families


def a_config(folder, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"model_type": "jetmoe"},
            "jetmoe than transformers.*share keys.*take rollout.engine=transformers",
        ),
        ({"model_type": "ernie4_5_moe"}, "on a CPU computes other log-probs of ernie4_5_moe"),
        ({"model_type": "gemma3n", "text_config": {}}, "leaves the embeddings of each layer out"),
        ({"model_type": "falcon_h1"}, "state-space layers of falcon_h1 fail in vLLM on a CPU"),
        (
            {
                "model_type": "qwen2",
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 48,
                },
            },
            "for 96 tokens.* is 100, expected at most 96",
        ),
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
        {"model_type": "gpt_neox"},
        {"model_type": "lfm2_moe"},
        {"model_type": "mimo_v2_flash"},
        {"model_type": "falcon_h1"},
        {
            "model_type": "qwen2",
            "rope_scaling": {
                "type": "yarn",
                "factor": 4,
                "original_max_position_embeddings": 25,
            },
        },
    ],
)
def test_a_model_whose_rows_vllm_computes_alike_is_not_refused(settings, tmp_path):
    check_logprobs_of_vllm(a_config(tmp_path, **settings), 100, DeviceKind.CUDA)


def test_plan_refuses_it_for_vllm_alone(capsys, tmp_path, digits_task):
    model = a_config(tmp_path / "model", model_type="jetmoe")
    words = [
        "plan",
        "configs/quickstart.yaml",
        f"model.path={model}",
        f"data.url={digits_task.train}",
    ]
    with pytest.raises(SystemExit):
        main([*words, "rollout.engine=vllm"])
    assert "vLLM computes other log-probs of jetmoe" in capsys.readouterr().err
    main([*words, "rollout.engine=transformers"])
    assert "vLLM" not in capsys.readouterr().err


def test_docs_models_says_of_every_family_what_vllm_does_with_it():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    lines = page.partition("| with vLLM 0.32 | families |\n")[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    table = {what: re.findall(r"`([\w-]+)`", names) for what, names in cells}
    listed = [name for names in table.values() for name in names]
    assert sorted(listed) == sorted({family.kind for family in families.FAMILIES.values()})
    assert set(table["equal"]) == {families.FAMILIES[name].kind for name in EQUAL}
    refused = next(names for what, names in table.items() if what == "refused by `plan`")
    assert {*refused, "gemma3n"} == {*OTHER_LOGPROBS}
    windows = next(names for what, names in table.items() if "their windows" in what)
    assert set(windows) == {*OTHER_WINDOWS}
    on_cpus = next(names for what, names in table.items() if what.startswith("refused on CPUs"))
    assert set(on_cpus) == {*OTHER_LOGPROBS_ON_CPU, *FAILS_ON_CPU}


@pytest.mark.sweep
@pytest.mark.parametrize("family", REFUSED)
def test_vllm_still_computes_others_and_the_same_of_rows_within_a_window(
    family, monkeypatch, tmp_path
):
    """Where this fails, vLLM has been mended: the family leaves the table."""
    pytest.importorskip("vllm")
    from siirl_dask.rollout.vllm_engine import engine as vllm_engine
    from tests.rollout.test_vllm_engine import running

    monkeypatch.setattr(vllm_engine, "check_logprobs_of_vllm", lambda *model: None)

    def agrees(name, **changed):
        folder = tmp_path / name
        written_for_vllm(folder, family, monkeypatch, **changed)
        with running(folder) as engine:
            assert_agrees_with_trainer(engine, folder, after=(0, 1))

    with pytest.raises(AssertionError, match="not close"):
        agrees("other")
    if family in ("cohere2", "qwen2_moe"):
        agrees("same", sliding_window=1024)
