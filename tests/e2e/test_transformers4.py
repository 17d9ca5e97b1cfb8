"""Base folders as transformers 4.57 writes them are trained and exported, and it reads the
trainer's log-probs out of the exports, of rows with images as well.
"""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from siirl_dask.cli import main
from siirl_dask.config import Dtype, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.images.noise import noise
from siirl_dask.tasks.tiny_vlm import tiny_vlm
from siirl_dask.testing.image_rows import READ, pack, processor_of
from siirl_dask.training import build_trainer
from siirl_dask.training.files.hugging_face import write_hugging_face
from siirl_dask.training.files.verify import check_export
from siirl_dask.training.model.vision import plain_arguments
from tests.settings import trainer_config

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "transformers4" / "bin" / "python"
SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 256, "bos_token_id": None,
    "eos_token_id": 257,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA3_TIED = {"rope_theta": 5e5, "rope_scaling": LLAMA3, "tie_word_embeddings": True}
# as Qwen2.5's page says
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 8.0}
GEMMA3 = {
    "num_hidden_layers": 4, "head_dim": 8, "query_pre_attn_scalar": 8, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "sliding_window": 8, "layer_types": [*["sliding_attention"] * 3, "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3_OLDER = {
    "layer_types": None,
    "dtype": None,
    "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16",
}
GLM4_MOE = {
    "num_hidden_layers": 3, "head_dim": 8, "rope_theta": 1e6, "partial_rotary_factor": 0.5, "attention_bias": True,
    "use_qk_norm": True, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
MROPE = {"type": "mrope", "mrope_section": [4, 6, 6]}  # as the hub's Qwen2.5-VL and Qwen3-VL say
INTERLEAVED = {"rope_type": "default", "mrope_section": [4, 6, 6], "mrope_interleaved": True}
TEXT = {**SIZES, "hidden_size": 128, "rope_theta": 5e5, "tie_word_embeddings": True}
TOWER = {
    "hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 128,
}  # fmt: skip
IMAGE_TEXT = {
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_scaling": MROPE},
        "vision_config": {**TOWER, "fullatt_block_indexes": [1], "window_size": 32},
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "head_dim": 32, "rope_scaling": INTERLEAVED},
        "vision_config": {**TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    },
}
RUN = (
    "run.steps=2",
    "data.batch_size=4",
    "rollout.n=2",
    "rollout.max_response_length=48",
    "rewards.function=tests.e2e.rewards:checksum",
    "trainer.lr=1e-2",
    "trainer.warmup_steps=0",
    "checkpoint.every=1",
)
WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class Base:
    """A tiny model as transformers 4.57 writes it."""

    kind: str
    """The ``model_type`` of its config.json."""
    settings: dict = field(default_factory=dict)
    """Settings of its config, beside the sizes."""
    dtype: str = "float32"
    shard: str = "5GB"
    """The most bytes of a file of weights."""
    later_layer: int | None = None
    """The number of a layer whose weights lie beside those of the model, and that it does not
    have."""
    options: tuple[str, ...] = ()
    """Settings of the run."""
    older: dict = field(default_factory=dict)
    """Settings of its config.json as transformers 4.50 wrote it; None for those that it did not
    write."""


BASES = {
    "qwen2.5": Base("qwen2", {"rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen2.5, untied, yarn": Base(
        "qwen2", {"rope_theta": 1e6, "rope_scaling": YARN}, "bfloat16", shard="20KB"
    ),
    "llama-3": Base("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama-3, tied, adapters": Base(
        "llama", LLAMA3_TIED, "bfloat16", options=("trainer.lora.rank=4",)
    ),
    # with values that transformers does not take by default, as the hub's are
    "gemma-3": Base("gemma3_text", {**GEMMA3, "rope_theta": 5e5, "rope_local_base_freq": 5e3}),
    "gemma-3, scaled": Base(
        "gemma3_text", {**GEMMA3, "rope_scaling": LINEAR}, "bfloat16", older=GEMMA3_OLDER
    ),
    "glm-4.5": Base("glm4_moe", GLM4_MOE, later_layer=3, shard="40KB"),
    "glm-4.5, fsdp": Base(
        "glm4_moe",
        GLM4_MOE,
        "bfloat16",
        later_layer=3,
        shard="20KB",
        options=("trainer.backend=fsdp",),
    ),
}


class Transformers4:
    """The program of the other environment, until the ``with`` block ends."""

    def __init__(self):
        assert PYTHON.exists(), (
            f"{PYTHON} is not there; make build/transformers4/installed makes it"
        )
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        }
        command = [str(PYTHON), str(Path(__file__).with_name("transformers4.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def ask(self, do, **request):
        self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"transformers 4 ended over {do} {request}"
        answer = json.loads(line)
        assert "error" not in answer, f"{do} {request}: {answer['error']}"
        return answer


@pytest.fixture(scope="module")
def transformers4():
    with Transformers4() as program:
        where = program.ask("where")
        assert where["transformers"].startswith("4.57.")
        assert not where["siirl_dask"]
        yield program


@pytest.fixture
def base(request, transformers4, tmp_path):
    """The folder of a base, and what it is."""
    given = BASES[request.param]
    folder = tmp_path / "base"
    folder.mkdir()
    transformers4.ask(
        "write",
        folder=str(folder),
        kind=given.kind,
        settings={**SIZES, "tie_word_embeddings": False, **given.settings},
        dtype=given.dtype,
        shard=given.shard,
        later_layer=given.later_layer,
    )
    if given.older:
        file = folder / "config.json"
        settings = {**json.loads(file.read_text()), **given.older}
        written = {
            name: value for name, value in settings.items() if given.older.get(name, "") is not None
        }
        file.write_text(json.dumps(written, indent=2) + "\n")
    return folder, given


def tensors_of(folder):
    """The shape of each tensor in a folder's files, and the type of its numbers, by its name."""
    found = {}
    for file in folder.glob(f"*{WEIGHTS}"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # the file is no mapping
                part = opened.get_slice(name)
                found[name] = (part.get_shape(), part.get_dtype())
    return found


def others(folder):
    """The bytes of a folder's files but for weights, their index, and the config."""
    named = {file.name: file for file in folder.iterdir() if WEIGHTS not in file.name}
    return {name: file.read_bytes() for name, file in named.items() if name != "config.json"}


def apart(found, expected):
    """How far log-probs of rows are from those that are expected."""
    return float((flat(found) - flat(expected)).abs().max())


def flat(rows):
    return torch.tensor([logprob for row in rows for logprob in row], dtype=torch.float64)


@pytest.mark.parametrize("base", BASES, indirect=True)
def test_transformers_4_reads_the_trainers_log_probs_out_of_an_export(
    base, transformers4, train, tmp_path
):
    folder, given = base
    run = train("run", f"model.path={folder}", *RUN, *given.options)
    scored = run.table("rollouts", 2).to_pylist()  # with the weights of step 1
    rows = [[row["prompt_ids"], row["response_ids"]] for row in scored]
    # beyond windows and original contexts
    assert max(len(prompt) + len(response) for prompt, response in rows) > 40
    expected = [row["old_logprobs"] for row in scored]

    def read(path):
        return transformers4.ask("read", folder=str(path), rows=rows)

    export = tmp_path / "export"
    main(["export", str(run.url), str(export), "--step", "1", "--verify"])
    found = read(export)
    untrained = read(folder)
    assert apart(found["logprobs"], expected) < 1e-5
    assert apart(untrained["logprobs"], expected) > 1e-2
    assert (found["missing"], found["unexpected"]) == ([], untrained["unexpected"])

    # the folder is the base's with other numbers
    config = (folder / "config.json").read_text()
    assert (export / "config.json").read_text() == config.replace('"bfloat16"', '"float32"')
    assert others(export) == others(folder)
    assert tensors_of(export) == {
        name: (shape, "F32") for name, (shape, _) in tensors_of(folder).items()
    }
    texts = [row["prompt"] for row in scored]
    assert transformers4.ask("encode", folder=str(export), texts=texts)["ids"] == [
        prompt for prompt, _ in rows
    ]
    if given.dtype == "bfloat16":
        main(
            ["export", str(run.url), str(tmp_path / "short"), "--step", "1", "--dtype", "bfloat16"]
        )
        assert (tmp_path / "short" / "config.json").read_text() == config
        assert tensors_of(tmp_path / "short") == tensors_of(folder)

    # what this transformers writes is another model to that one: it would be seen here
    AutoConfig.from_pretrained(export).save_pretrained(export)
    assert apart(read(export)["logprobs"], expected) > 1e-2


def image_text_base(transformers4, family, folder):
    """Write a tiny image-text model whose config and weights are transformers 4.57's, with
    tokenizer and processors.
    """
    tiny_vlm(folder, family=family)
    config = json.loads((folder / "config.json").read_text())
    tokens = {
        key: value
        for key, value in config.items()
        if key.endswith("_token_id") and isinstance(value, int)
    }
    written = folder.with_name("written")
    written.mkdir()
    settings = {**IMAGE_TEXT[family], **tokens, "tie_word_embeddings": True}
    transformers4.ask(
        "write", folder=str(written), kind=family, settings=settings, dtype="float32", shard="5GB",
        later_layer=None,
    )  # fmt: skip
    for name in ("config.json", "model.safetensors"):
        copyfile(written / name, folder / name)
    return tokens


def rows_of_images(folder, tokens):
    """Rows that show no image, one, and two, each behind the token by which transformers 4.57
    finds images.
    """
    processor = processor_of(folder)
    images = (noise(24, 16, 0), noise(16, 40, 1))
    shown = {}
    for image in images:
        marks = [processor.image_token] * processor.tokens(image)
        shown[image] = [tokens["vision_start_token_id"], *marks, tokens["vision_end_token_id"]]
    first, second = images
    return [
        ([5, 6, 7], [8, 9, 10, 11], ()),
        ([1, *shown[first], 2, 3], [4, 5, 6], (first,)),
        ([*shown[second], 9, *shown[first], 12], [*range(20, 50)], (second, first)),
    ]


@pytest.mark.parametrize("family", IMAGE_TEXT)
def test_transformers_4_reads_the_trainers_log_probs_of_rows_with_images_out_of_an_export(
    family, transformers4, tmp_path
):
    folder = tmp_path / "base"
    export = tmp_path / "export"
    rows = rows_of_images(folder, image_text_base(transformers4, family, folder))
    model = ModelConfig(path=str(folder))
    trainer = build_trainer(
        Device("w"),
        Rank(),
        model=model,
        trainer=trainer_config(),
        rollout=RolloutConfig(),
        images=READ,
    )
    for number, weight in enumerate(trainer.state()["model"].values()):
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    expected = trainer.logprobs(pack(rows)).logprobs.double()
    weights = dict(trainer.weights())
    export.mkdir()
    write_hugging_face(export, weights, str(folder), Dtype.float32)
    check_export(export, weights, str(folder), Dtype.float32)

    processor = processor_of(folder)
    tensors = {}
    for number, (prompt, response, images) in enumerate(rows):
        pixels = [processor.pixels(image) for image in images]
        seen = plain_arguments(torch.tensor([prompt + response]), pixels, processor.image_token)
        tensors |= {
            f"{number}.{name}": seen[name]
            for name in seen
            if name in ("pixel_values", "image_grid_thw")
        }
    save_file(tensors, tmp_path / "images.safetensors")

    def read(path):
        texts = [[prompt, response] for prompt, response, _ in rows]
        return transformers4.ask(
            "read", folder=str(path), rows=texts, images=str(tmp_path / "images.safetensors")
        )

    found = read(export)
    untrained = read(folder)
    assert (flat(found["logprobs"]) - expected).abs().max() < 1e-5
    assert (flat(untrained["logprobs"]) - expected).abs().max() > 1e-2
    assert (found["missing"], found["unexpected"]) == ([], untrained["unexpected"])
    assert (export / "config.json").read_text() == (folder / "config.json").read_text()
    assert others(export) == others(folder)
    assert tensors_of(export) == tensors_of(folder)

    # of what this transformers writes that one cannot compute the positions
    AutoConfig.from_pretrained(export).save_pretrained(export)
    with pytest.raises(AssertionError, match=r"read .*'NoneType' object"):
        read(export)
