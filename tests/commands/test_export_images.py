"""``siirl-dask export`` of a model that sees images: transformers loads model and processor."""

from importlib.util import find_spec

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Device, Rank
from siirl_dask.driver.phases import dags
from siirl_dask.runs.attempt import take
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.export import export
from siirl_dask.runs.folder import write_identity
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.image_rows import PlainModel, image_rows, pack, processor_of
from siirl_dask.training import build_trainer
from siirl_dask.training.files.checkpoint import DistributedCheckpoint
from tests.conftest import digits_overrides

KINDS = {
    "whole": [],
    "frozen tower": ["trainer.freeze=[visual]"],
    "adapters": ["trainer.lora.rank=2", "trainer.lora.targets=[language_model,visual]"],
    "no images": ["images.column=null"],
}


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl"])
def base(request, tmp_path):
    return tiny_vlm(tmp_path / "base", seed=1, family=request.param)


@pytest.fixture
def run(request, base, digits_task, tmp_path):
    """The folder of a run with a checkpoint, and the trainer as it was then."""
    url = str(tmp_path / "run")
    options = [f"model.path={base}", "images.column=images", *KINDS[request.param]]
    file = load_config_file(
        shipped("quickstart.yaml"), [*digits_overrides(digits_task, url), *options]
    )
    config = file.config
    write_identity(config, dags(file)[0], replace=False)
    trainer = build_trainer(
        Device("w"),
        Rank(),
        model=config.model,
        trainer=config.trainer,
        rollout=config.rollout,
        images=config.images,
    )
    checkpoints = Checkpoints(attempt=take(url, 30.0, print), keep=9)
    for number, weight in enumerate(trainer.state()["model"].values()):
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    folder = checkpoints.folder(1)
    written = (
        DistributedCheckpoint(asynchronous=False)
        .save(f"{folder}/policy", trainer.state(), None)
        .result()
    )
    files = {f"policy/{name}": digest for name, digest in written.items()}
    checkpoints.commit(folder, CheckpointState(step=1, roles=["policy"]), files)
    return url, trainer


@pytest.mark.skipif(
    find_spec("torchvision") is None, reason="transformers' own processors need torchvision"
)
@pytest.mark.parametrize("run", KINDS, indirect=True)
def test_the_exported_folder_has_the_trainers_weights_and_processes_images_as_before(
    run, base, tmp_path
):
    url, trainer = run
    assert export(url, str(tmp_path / "out"), verify=True) == 1
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, weight in trainer.weights():
        assert torch.equal(model.get_parameter(name), weight), name
    assert {name for name, _ in trainer.weights()} == {name for name, _ in model.named_parameters()}
    image = image_rows(base)[0][2][0]
    given, exported = processor_of(base).pixels(image), processor_of(tmp_path / "out").pixels(image)
    assert given.grid == exported.grid
    assert torch.equal(given.values, exported.values)
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    assert type(processor) is type(AutoProcessor.from_pretrained(base))
    assert (
        processor.tokenizer.chat_template
        == AutoProcessor.from_pretrained(base).tokenizer.chat_template
    )


@pytest.mark.parametrize("run", ["adapters"], indirect=True)
def test_peft_puts_exported_adapters_on_the_same_layers(run, base, tmp_path):
    url, trainer = run
    export(url, str(tmp_path / "out"), adapter=True)
    adapted = PeftModel.from_pretrained(PlainModel(base).model, tmp_path / "out")
    expected = dict(trainer.weights())
    merged = dict(adapted.merge_and_unload().named_parameters())
    for name, weight in expected.items():
        assert (merged[name] - weight).abs().max() < 1e-6, name


@pytest.mark.parametrize("run", ["whole"], indirect=True)
def test_the_exported_model_scores_rows_with_images_as_the_trainer(run, tmp_path):
    url, trainer = run
    export(url, str(tmp_path / "out"))
    rows = pack(image_rows(tmp_path / "out"))
    with torch.no_grad():
        given = PlainModel(tmp_path / "out").logprobs(rows, 1.0)
    assert (given - trainer.logprobs(rows).logprobs).abs().max() < 1e-5
