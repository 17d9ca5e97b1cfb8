"""Writes a model that sees images, small enough for a test, as a Hugging Face folder with its
processors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from siirl_dask.images.families import VlmFamily
from siirl_dask.models.loading import no_progress_bars
from siirl_dask.tasks.tiny_model import tiny_tokenizer
from siirl_dask.tasks.vocabulary import VOCABULARY

PATCH = 4
MERGE = 2
CELL = PATCH * MERGE
"""Width and height, in pixels, of what the model sees as one token."""
_TEMPORAL = 2
_START = "<|vision_start|>"
_END = "<|vision_end|>"
_IMAGE = "<|image_pad|>"
_VIDEO = "<|video_pad|>"
VLM_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}{% if message['content'] is string "
    "%}{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == "
    "'image' %}" + _START + _IMAGE + _END + "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
_PROCESSORS: dict[VlmFamily, dict[str, str]] = {
    "qwen2_vl": {
        "processor_class": "Qwen2VLProcessor",
        "video_processor_type": "Qwen2VLVideoProcessor",
    },
    "qwen2_5_vl": {
        "processor_class": "Qwen2_5_VLProcessor",
        "video_processor_type": "Qwen2VLVideoProcessor",
    },
    "qwen3_vl": {
        "processor_class": "Qwen3VLProcessor",
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
}


def tiny_vlm(
    folder: str | Path,
    *,
    seed: int = 0,
    family: VlmFamily = "qwen2_5_vl",
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vision_hidden: int = 64,
    depth: int = 1,
    least_pixels: int = CELL * CELL,
    most_pixels: int = 128 * 128,
) -> Path:
    """Write a random model of half a million parameters with tokenizer and processors; same seed,
    same weights.

    A token of an image is 8 x 8 pixels. Heads are ``hidden // heads`` wide; some engines take none
    below 32. Images get from ``least_pixels`` to ``most_pixels`` pixels.
    """
    tokenizer = tiny_tokenizer(chat_template=VLM_TEMPLATE)
    special = [
        AddedToken(text, normalized=False, special=True) for text in (_START, _END, _IMAGE, _VIDEO)
    ]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": special}, replace_extra_special_tokens=False
    )
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, (_START, _END, _IMAGE, _VIDEO))
    head = hidden // heads
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": _sections(head),
        },
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    vision: dict[str, Any] = {
        "hidden_size": vision_hidden,
        "intermediate_size": 2 * vision_hidden,
        "depth": depth,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": _TEMPORAL,
        "out_hidden_size": hidden,
    }
    ids = {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(family, text, vision, {**ids, "tie_word_embeddings": True}, head)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _write_processors(
        Path(folder), family, {"shortest_edge": least_pixels, "longest_edge": most_pixels}
    )
    return Path(folder)


def _model(
    family: VlmFamily,
    text: dict[str, Any],
    vision: dict[str, Any],
    common: dict[str, Any],
    head: int,
) -> PreTrainedModel:
    config: PreTrainedConfig
    if family == "qwen3_vl":
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        config = Qwen3VLConfig(
            text_config={**text, "head_dim": head}, vision_config=vision, **common
        )
        return Qwen3VLForConditionalGeneration(config)
    if family == "qwen2_vl":
        width = vision["hidden_size"]
        vision |= {"embed_dim": width, "mlp_ratio": vision.pop("intermediate_size") // width}
        # in Qwen2-VL the width of what the tower gives
        vision |= {"hidden_size": vision.pop("out_hidden_size")}
        return Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(text_config=text, vision_config=vision, **common)
        )
    vision |= {"fullatt_block_indexes": [vision["depth"] - 1], "window_size": 4 * CELL}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **common)
    return Qwen2_5_VLForConditionalGeneration(config)


def _sections(head: int) -> list[int]:
    """Return how many pairs of a head's numbers turn with time, height and width: a quarter, and
    three eighths each.
    """
    side = head // 2 * 3 // 8
    return [head // 2 - 2 * side, side, side]


def _write_processors(folder: Path, family: VlmFamily, size: dict[str, int]) -> None:
    common = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": _TEMPORAL,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": size,
        "processor_class": _PROCESSORS[family]["processor_class"],
    }
    image = {"image_processor_type": "Qwen2VLImageProcessor", **common}
    video = {"video_processor_type": _PROCESSORS[family]["video_processor_type"], **common}
    for name, values in {
        "preprocessor_config.json": image,
        "video_preprocessor_config.json": video,
    }.items():
        (folder / name).write_text(json.dumps(values, indent=2))
