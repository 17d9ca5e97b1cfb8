"""A run of this package: transformers generates, plain torch learns.

python -m against_trl.run_ours SETTING CURVES.json    # SETTING: JSON
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory

from siirl_dask.config.file import load_config_file
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from siirl_dask.observe import Record, read_metrics

from .setting import Curves, Setting, answer_to

_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
_APART = "{rollout: [0, 1], reward: [0, 1], policy: [2, 3]}"


def run_ours(setting: Setting, url: str) -> Curves:
    """Everything that the run writes is left below ``url``."""
    return train_ours(_CONFIG, overrides(setting, url), url)


def train_ours(config: Path, values: Mapping[str, object], url: str) -> Curves:
    """Run a config with these values in place of its own."""
    file = load_config_file(config, [f"{key}={value}" for key, value in values.items()])
    run(file.config, *dags(file), fresh=True)
    records = read_metrics(url)
    train = [record for record in records if record["phase"] == "train"]
    validation = [record for record in records if record["phase"] == "validation"]
    return Curves(
        rewards=_values(train, "reward/mean"),
        entropy=_values(train, "policy/entropy"),
        ends=list(accumulate(record["seconds"] for record in train)),
        accuracy=_values(validation, "reward/mean"),
    )


def _values(records: Sequence[Record], name: str) -> list[float]:
    values = [record["metrics"][name] for record in records]
    return [nan if value is None else value for value in values]


def overrides(setting: Setting, url: str) -> dict[str, object]:
    """Return values for keys of the config, by key."""
    task = setting.task
    return {
        "run.url": url,
        "run.steps": setting.steps,
        "run.seed": setting.seed,
        "cluster.workers": setting.workers,
        "cluster.threads": setting.threads,
        "cluster.placement": _APART if setting.workers == 4 else "{}",
        "data.url": task.train,
        "data.prepare": "null",
        "data.batch_size": setting.prompts,
        "data.max_prompt_length": setting.max_prompt,
        "model.path": task.model,
        "rollout.engine": "transformers",
        "rollout.n": setting.samples,
        "rollout.temperature": setting.temperature,
        "rollout.max_response_length": setting.max_response,
        "rollout.max_rows": setting.rows,
        "algorithm.minibatches": setting.minibatches,
        "algorithm.split_groups": setting.mixed,
        "algorithm.old_logprobs": f"siirl_dask.nodes:{'rollout' if setting.told else 'policy'}_logprobs",
        "algorithm.loss_options": f"{{clip_low: {setting.clip}, clip_high: {setting.clip}}}",
        "algorithm.aggregation": "siirl_dask.algorithms:sequence_mean_token_mean",
        "trainer.lr": setting.lr,
        "trainer.warmup_steps": setting.warmup,
        "trainer.max_grad_norm": setting.max_grad_norm,
        "validation.every": setting.steps,
        "validation.url": task.validation if setting.validate else "null",
        "validation.test_url": "null",
        "checkpoint.every": 0,
        "observe.progress": "false",
    }


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        answer_to(sys.argv[1:], partial(run_ours, url=folder))
