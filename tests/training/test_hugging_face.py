"""An exported folder is that of the base with other weights, for whatever reads it."""

import json
from dataclasses import replace
from types import SimpleNamespace
from uuid import uuid4

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from siirl_storage import open_fs
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from siirl_dask.config import Config, Dtype, LoraConfig, ModelConfig, TrainerConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models import adapter_folder
from siirl_dask.models.cache import FOLDER
from siirl_dask.models.weight_files import check_weights
from siirl_dask.rollout.weight_loading import WeightLoader
from siirl_dask.runs.export import write_folder
from siirl_dask.tasks.tiny_model import tiny_model, tiny_tokenizer
from siirl_dask.tasks.vocabulary import VOCABULARY
from siirl_dask.training.files import checkpoint, hugging_face
from siirl_dask.training.files.hugging_face import weight_buffers, write_hugging_face
from siirl_dask.training.files.verify import check_export

ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma3": ("gemma3_text", {"head_dim": 16}),
    "gemma4": ("gemma4_text", {"head_dim": 16, "vocab_size_per_layer_input": VOCABULARY}),
    "phi3": ("phi3", {}),
    "glm4_moe": ("glm4_moe", {"head_dim": 16, **ROUTED, **GROUPS}),
    "deepseek_v3": ("deepseek_v3", {**ROUTED, **GROUPS, **LATENT}),
    "deepseek_v4": (
        "deepseek_v4",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 16,
            "o_lora_rank": 16,
            "o_groups": 2,
            "hc_mult": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "partial_rotary_factor": 0.5,
            "layer_types": ["sliding_attention", "compressed_sparse_attention"],
            "mlp_layer_types": ["moe", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
}
TOKENS = torch.randint(0, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))


def random_model(folder, family):
    """A model of random weights, and of random buffers where these are saved with its weights."""
    kind, options = FAMILIES[family]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if "kv_lora_rank" not in options else 4,
    }
    settings = sizes | heads | options
    if kind == "deepseek_v4":
        del settings["intermediate_size"]  # another name of its experts' width
    config = CONFIG_MAPPING[kind](**settings, pad_token_id=0, eos_token_id=1, bos_token_id=1)
    draw = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        tensor.copy_(
            torch.randn(tensor.shape, generator=draw) * (0.3 if name in parameters else 1.0)
        )
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def names_in(folder):
    return {name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_with_the_bases_names_and_buffers(family, tmp_path):
    model = random_model(tmp_path / "base", family)
    check_weights(str(tmp_path / "base"))
    learned = {name: 1.5 * parameter.detach() for name, parameter in model.named_parameters()}
    buffers = weight_buffers(str(tmp_path / "base"))
    (tmp_path / "out").mkdir()
    write_hugging_face(tmp_path / "out", learned, str(tmp_path / "base"), Dtype.float32)
    model.load_state_dict(learned, strict=False)
    with torch.no_grad():
        expected = model.eval()(TOKENS).logits
    assert torch.equal(logits(tmp_path / "out"), expected)
    assert names_in(tmp_path / "out") == names_in(tmp_path / "base")
    check_export(tmp_path / "out", learned, str(tmp_path / "base"), Dtype.float32)
    assert bool(buffers) is (family in ("gemma4", "glm4_moe", "deepseek_v3", "deepseek_v4"))


def image_text_model(folder, kind="qwen3_5", wide=False):
    """An image-text model whose text transformers takes for a model of its own, as it takes
    Qwen3.5's. The experts of a mixture are one tensor each in its files. A wide one has the
    widths that vLLM's kernels for CPUs take.
    """
    width = 128 if wide else 32
    text = {
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "vocab_size": VOCABULARY,
        "head_dim": width // 4 if wide else 16,
    }
    text |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    text |= {f"linear_{part}_head_dim": 128 if wide else 8 for part in ("key", "value")}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    if kind == "qwen3_5_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width // 2}
        text |= {"shared_expert_intermediate_size": width // 2}
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": width,
    }
    tower |= {
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
    }
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=tower, image_token_id=260)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_of_an_image_text_model_is_exported_under_the_bases_names_with_the_bases_tower(
    tmp_path, kind
):
    base, out = tmp_path / "base", tmp_path / "out"
    whole = image_text_model(base, kind)
    extra = {"mtp.head.weight": torch.ones(3, 2)}
    save_file(
        load_file(base / "model.safetensors") | extra, base / "model.safetensors", {"format": "pt"}
    )
    learned = {
        name: 1.5 * parameter.detach()
        for name, parameter in AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32
        ).named_parameters()
    }
    out.mkdir()
    write_hugging_face(out, learned, str(base), Dtype.float32)
    assert names_in(out) == names_in(base)
    check_export(out, learned, str(base), Dtype.float32)
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert after["mtp.head.weight"].tolist() == extra["mtp.head.weight"].tolist()
    for name, tensor in before.items():
        factor = 1.0 if name.startswith(("model.visual", "mtp")) else 1.5
        assert torch.equal(after[name], factor * tensor), name
    exported = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if ".visual." not in name:
                parameter.mul_(1.5)
        assert torch.equal(exported(TOKENS).logits, whole(TOKENS).logits)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "glm4_moe", "qwen3_5"])
def test_routers_norms_and_a_tower_keep_the_types_that_they_have_in_the_base(tmp_path, kind):
    base, out = tmp_path / "base", tmp_path / "out"
    if kind == "qwen3_5":
        image_text_model(base)
    else:
        random_model(base, kind)
    file = base / "model.safetensors"
    fine = ("norm.weight", "gate.weight", "correction_bias", "patch_embed.proj.bias")
    mixed = {
        name: tensor if name.endswith(fine) else tensor.bfloat16()
        for name, tensor in load_file(file).items()
    }
    save_file(mixed, file, {"format": "pt"})
    types = {name: tensor.dtype for name, tensor in mixed.items()}
    assert {*types.values()} == {torch.float32, torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    learned = {name: 1.1 * parameter.detach() for name, parameter in model.named_parameters()}
    out.mkdir()
    write_hugging_face(out, learned, str(base), Dtype.bfloat16, as_stored=True)
    check_export(out, learned, str(base), Dtype.bfloat16, as_stored=True)
    written = load_file(out / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == types
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_the_tower_of_a_base_at_a_url_is_fetched_though_its_config_alone_was_needed(
    tmp_path, monkeypatch
):
    """Without it config.json would be of another model than the weights, and their names too."""
    base, out = tmp_path / "base", tmp_path / "out"
    image_text_model(base)
    learned = dict(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).named_parameters()
    )
    url = f"memory://{uuid4().hex}"
    fs, path = open_fs(url)
    fs.put(f"{base}/", f"{path}/", recursive=True)
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "read_model", lambda role_url, ema: learned)
    found = SimpleNamespace(step=1, url="", state=lambda: SimpleNamespace(roles=["policy"]))
    out.mkdir()
    write_folder(
        out, str(tmp_path), Config(model=ModelConfig(path=url)), found, role="policy", verify=True
    )
    assert names_in(out) == names_in(base)


def llama4(folder):
    """An image-text Llama 4, whose text's names all begin with another word in its files."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "intermediate_size_mlp": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
    }
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "image_size": 28, "vision_output_dim": 32}
    tower |= {"projector_input_dim": 32, "projector_output_dim": 32}
    config = CONFIG_MAPPING["llama4"](text_config=text, vision_config=tower, image_token_index=260)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "llama4"])
def test_engines_get_the_text_of_an_image_text_model_under_the_bases_names(tmp_path, kind):
    """vLLM goes by config.json, and builds the model of the files."""
    if kind == "llama4":
        llama4(tmp_path)
    else:
        image_text_model(tmp_path, kind)
    text = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sent = dict(WeightLoader.of_folder(str(tmp_path)).as_in_files(text.named_parameters()))
    files = load_file(tmp_path / "model.safetensors")
    of_images = ("model.visual.", "vision_model.", "multi_modal_projector.")
    assert sent.keys() == {name for name in files if not name.startswith(of_images)}
    for name, tensor in sent.items():
        assert torch.equal(tensor, files[name]), name


def test_a_tower_that_is_not_the_bases_is_found_though_the_text_is_the_trained_one(tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    image_text_model(base)
    learned = dict(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).named_parameters()
    )
    out.mkdir()
    write_hugging_face(out, learned, str(base), Dtype.float32)
    written = load_file(out / "model.safetensors")
    name = "model.visual.patch_embed.proj.weight"
    save_file({**written, name: 2 * written[name]}, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"another model: {name} is not that of"):
        check_export(out, learned, str(base), Dtype.float32)
    del written[name]
    save_file(written, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ConfigError, match=f"another model: it lacks {name}, which .* has beside the model"
    ):
        check_export(out, learned, str(base), Dtype.float32)


def test_a_folder_of_another_model_differs(tmp_path):
    base = tiny_model(tmp_path / "base")
    weights = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    (tmp_path / "out").mkdir()
    write_hugging_face(tmp_path / "out", weights, str(base), Dtype.bfloat16)
    check_export(tmp_path / "out", weights, str(base), Dtype.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10.0
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="another model: its log-probs differ by"):
        check_export(tmp_path / "out", weights, str(base), Dtype.bfloat16)


def test_all_files_that_hold_no_weights_are_copied_as_they_are_but_for_the_type(tmp_path):
    base, out = tiny_model(tmp_path / "base"), tmp_path / "out"
    config = json.loads((base / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    config |= {
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "transformers_version": "4.51.0",
        "temperature": 0.5,
    }
    config |= {"quantization_config": {"quant_method": "fp8"}, "part": {"torch_dtype": "bfloat16"}}
    (base / "config.json").write_text(json.dumps(config))
    del config["quantization_config"]
    (base / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.6,\n\n"top_p": 0.9}'
    )
    (base / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer", "additional_special_tokens": []}'
    )
    (base / "merges.txt").write_bytes(b"\xff of another tokenizer")
    for name in (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        ".gitattributes",
        "adapter_config.json",
    ):
        (base / name).write_text("no file of the export")
    weights = dict(
        AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "b")).named_parameters()
    )
    out.mkdir()
    write_hugging_face(out, weights, str(base), Dtype.bfloat16)
    assert json.loads((out / "config.json").read_text()) == config | {
        "torch_dtype": "bfloat16",
        "part": {"torch_dtype": "bfloat16"},
    }
    copied = {"generation_config.json", "tokenizer_config.json", "tokenizer.json", "merges.txt"}
    assert {file.name for file in out.iterdir()} == {*copied, "config.json", "model.safetensors"}
    assert all((out / name).read_bytes() == (base / name).read_bytes() for name in copied)


@pytest.mark.parametrize(
    ("base", "named", "revision"),
    [
        ("hf://org/name", "org/name", None),
        ("hf://org/name@v1", "org/name", "v1"),
        ("hf://org/name@v1/folder", "hf://org/name@v1/folder", None),
        ("s3://bucket/name", "s3://bucket/name", None),
    ],
)
def test_adapters_name_a_base_of_the_hub_as_peft_does(base, named, revision, tmp_path, monkeypatch):
    configs = {"hf://org/name": {"hidden_size": 64}, "hf://org/other": {"hidden_size": 32}}
    monkeypatch.setattr(hugging_face, "read_config", configs.get)
    monkeypatch.setattr(adapter_folder, "read_config", configs.get)
    adapters = {
        "model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 8),
        "model.layers.0.self_attn.q_proj.lora_B.weight": torch.zeros(8, 4),
    }
    trainer = replace(TrainerConfig(), lora=LoraConfig(rank=4))
    hugging_face.write_adapters(tmp_path, adapters, trainer, base, Dtype.float32)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (named, revision)
    adapter_folder.check_same_base(named, "hf://org/name", "lora.path")
    if named == "org/name":
        with pytest.raises(ConfigError, match=r"another model, 'hf://org/name', .* in hidden_size"):
            adapter_folder.check_same_base(named, "hf://org/other", "lora.path")
