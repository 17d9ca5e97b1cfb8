"""``siirl-dask export`` of a policy that ranks of megatron-core trained and saved, each its
part, in every layout.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from siirl_storage.digests import FileDigest
from torch.testing import assert_close

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Rank
from siirl_dask.driver.phases import dags
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.export import export
from siirl_dask.runs.folder import write_identity
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.reference_model import load_model, response_logprobs
from siirl_dask.testing.rows import LENGTHS, random_rows, split_rows
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from tests.conftest import digits_overrides
from tests.training.dividing import advance, config_of, copied, own_rows
from tests.training.roles import policy

# four processes, maybe beside four others, on two cores
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip(
    "megatron.core", reason="needs megatron-core: pip install 'siirl_dask[megatron]'"
)
ROWS = random_rows(LENGTHS)
CASES = {  # model, ranks, keys of trainer.megatron
    "1 x 1": ("qwen3", 1, {}),
    "2 x 1": ("qwen3", 2, {"tensor_parallel": 2}),
    "1 x 2": ("qwen3", 2, {"pipeline_parallel": 2}),
    "2 x 2": ("qwen3", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "1 x 2, context 2": ("qwen3", 4, {"pipeline_parallel": 2, "context_parallel": 2}),
    "1 x 2, two chunks": ("qwen3", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "2 x 2, untied": ("qwen2", 4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "experts of 2 x 1": ("qwen3_moe", 2, {"tensor_parallel": 2}),
    "experts over 2 of 4 replicas": ("qwen3_moe", 4, {"expert_parallel": 2}),
}
FAMILIES = ("qwen3", "qwen2", "qwen3_moe")


@dataclass(frozen=True)
class Trained:
    run: str
    logprobs: torch.Tensor
    """Log-probs of all rows, by the ranks that trained."""
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "layers": 4}
    return {
        name: str(tiny_model(root / name, seed=1, tied=name == "qwen3", family=name, **sizes))
        for name in FAMILIES
    }


@pytest.fixture(scope="module")
def trained(models, digits_task, tmp_path_factory):
    """A run with a checkpoint of step 1 for each case."""
    root = tmp_path_factory.mktemp("runs")
    folders, checkpoints = {}, {}
    for name, (family, _, keys) in CASES.items():
        given = [f"trainer.megatron.{key}={value}" for key, value in keys.items()]
        more = [f"model.path={models[family]}", "trainer.backend=megatron", *given]
        url = str(root / name)
        file = load_config_file(
            shipped("quickstart.yaml"), [*digits_overrides(digits_task, url), *more]
        )
        write_identity(file.config, dags(file)[0], replace=False)
        checkpoints[name] = Checkpoints(attempt=take(url, 30.0, print), keep=9)
        folders[name] = checkpoints[name].folder(1)
    seen = run_ranks(4, partial(in_each_rank, models, folders), tmp_path_factory.mktemp("ranks"))
    results = {}
    for name, (_, size, _) in CASES.items():
        parts = [seen[rank][name] for rank in range(size)]
        files = {
            f"policy/{file}": FileDigest(*one)
            for part in parts
            for file, one in part["files"].items()
        }
        checkpoints[name].commit(folders[name], CheckpointState(step=1, roles=["policy"]), files)
        logprobs = torch.cat([part["logprobs"] for part in parts])
        results[name] = Trained(str(root / name), logprobs, parts[0]["weights"])
    return results


def in_each_rank(models, folders, world):
    single, pair, beside = dist.new_group([0]), dist.new_group([0, 1]), dist.new_group([0, 1])
    results = {}
    for name, (family, size, keys) in CASES.items():
        if world.rank >= size:
            continue
        ranks = {1: Rank(0, 1, single, single), 2: Rank(world.rank, 2, pair, beside), 4: world}
        rank, experts = ranks[size], keys.get("expert_parallel")
        config = config_of(
            keys.get("tensor_parallel", 1), keys.get("pipeline_parallel", 1), experts=experts
        )
        trainer = policy(models[family], config, rank=rank)
        advance(trainer, rank, 0)
        written = (
            DistributedCheckpoint()
            .save(f"{folders[name]}/policy", trainer.state(), rank.side_group)
            .result()
        )
        results[name] = {
            "files": {file: (one.nbytes, one.sha256) for file, one in written.items()},
            "logprobs": trainer.logprobs(own_rows(rank, LENGTHS)).logprobs,
            "weights": copied(trainer),
        }
    return results


@pytest.mark.parametrize("name", CASES)
def test_the_exported_folder_gives_the_log_probabilities_of_the_ranks_that_trained(
    name, models, trained, tmp_path
):
    one = trained[name]
    assert export(one.run, str(tmp_path / "out")) == 1
    model = load_model(tmp_path / "out")
    scored = {}
    for folder, scores in (
        (tmp_path / "out", model),
        (models[CASES[name][0]], load_model(models[CASES[name][0]])),
    ):
        with torch.no_grad():
            given = [
                response_logprobs(scores, row[:n].tolist(), row[n:].tolist())
                for row, n in split_rows(ROWS)
            ]
        scored[folder] = torch.cat(given)
    assert_close(scored[tmp_path / "out"], one.logprobs, atol=1e-5, rtol=0)
    assert (scored[models[CASES[name][0]]] - one.logprobs).abs().max() > 1e-3, (
        "as if nothing had been learned"
    )
    for key, weight in one.weights.items():
        assert torch.equal(model.get_parameter(key), weight), key
