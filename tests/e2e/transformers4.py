"""Writes base folders and reads exported ones with the transformers of the environment that runs
it, and with nothing of siirl_dask. It takes requests from standard input, and gives answers on
standard output, each a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2TokenizerFast,
)

PAD = "<|pad|>"
END = "<|end|>"
WEIGHTS = "*.safetensors"
SEEN = ("pixel_values", "image_grid_thw")
"""Arguments for the images of a row."""


def write(folder, kind, settings, dtype, shard, later_layer):
    """Write a model with random weights as large as trained ones, and its tokenizer.
    ``later_layer`` is the number of a layer for several tokens, whose weights are in the files, and
    which transformers does not build.
    """
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**settings)
    class_of_model = (
        AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    )
    model = class_of_model.from_config(config)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.ndim >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
    model.to(getattr(torch, dtype))
    for name, buffer in list(model.named_buffers()):
        module, _, last = name.rpartition(".")
        # the hub has them in float32, in models of bfloat16 too
        if last == "e_score_correction_bias":
            bias = torch.randn(buffer.shape, generator=draw) * 0.1
            model.get_submodule(module).register_buffer(last, bias)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer(kind, Path(folder)).save_pretrained(folder)
    if later_layer is not None:
        add_layer(Path(folder), later_layer)
    return {}


def tokenizer(kind, folder):
    """Return a tokenizer without merges: Qwen2.5's class is its own, and has two more files."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, PAD, END])}
    special = {"pad_token": PAD, "eos_token": END}
    if kind == "qwen2":
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\n")
        files = {
            "vocab_file": str(folder / "vocab.json"),
            "merges_file": str(folder / "merges.txt"),
        }
        return Qwen2TokenizerFast(**files, **special, unk_token=None)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def add_layer(folder, number):
    """Add weights of a layer to the last file, and to the index of all files."""
    last = sorted(folder.glob(WEIGHTS))[-1]
    tensors = load_file(last)
    kind = next(iter(tensors.values())).dtype
    new = {
        f"model.layers.{number}.{part}.weight": torch.ones(4, dtype=kind)
        for part in ("eh_proj", "enorm")
    }
    save_file({**tensors, **new}, last, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    for name in new:
        listed["weight_map"][name] = last.name
    index.write_text(json.dumps(listed, indent=2) + "\n")


def read(folder, rows, images=None):
    """Return what transformers finds in a folder, and the log-probs of each row: prompts and
    responses of token ids. ``images`` is a file of what the model sees in each row; there is none
    for a model of text.
    """
    class_of_model = AutoModelForCausalLM if images is None else AutoModelForImageTextToText
    model, info = class_of_model.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    model.eval()
    tensors = {} if images is None else load_file(images)
    logprobs = []
    for number, (prompt, response) in enumerate(rows):
        seen = {name: tensors[f"{number}.{name}"] for name in SEEN if f"{number}.{name}" in tensors}
        ids = torch.tensor([prompt + response])
        if images is not None:
            # as processors give it: without one Qwen3-VL takes equal positions of an image for rows
            # that are packed
            seen["attention_mask"] = torch.ones_like(ids)
        with torch.no_grad():
            logits = model(ids, use_cache=False, **seen).logits[0, len(prompt) - 1 : -1]
        scores = logits.log_softmax(-1)
        logprobs.append(scores.gather(1, torch.tensor(response)[:, None]).squeeze(1).tolist())
    return {
        "logprobs": logprobs,
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
    }


def encode(folder, texts):
    """Return the token ids of texts."""
    words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return {"ids": [words(text)["input_ids"] for text in texts]}


def where():
    """Return the versions that answer, and whether siirl_dask can be imported beside them."""
    return {
        "transformers": transformers.__version__,
        "siirl_dask": find_spec("siirl_dask") is not None,
    }


REQUESTS = {"write": write, "read": read, "encode": encode, "where": where}


def main():
    """Answer until standard input ends. What anything else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = REQUESTS[request.pop("do")](**request)
        except Exception as error:  # the test says which request it was
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
