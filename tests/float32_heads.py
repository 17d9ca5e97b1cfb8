"""Models and log-probs by hand for tests of ``model.float32_head`` in engines and trainers."""

from safetensors.torch import load_file

from siirl_dask.config import Dtype
from siirl_dask.tasks.tiny_model import tiny_model

WIDE = {"dtype": Dtype.bfloat16, "float32_head": True}
FAMILIES = ["qwen2", "qwen3"]


def write_model(folder, family):
    """Write a model, whose head is tied in one of the two families."""
    return tiny_model(folder, seed=1, family=family, tied=family == "qwen3")


def head_of(folder):
    weights = load_file(folder / "model.safetensors")
    return weights.get("lm_head.weight", weights["model.embed_tokens.weight"])


def logprobs_of(states, weight, tokens, temperature):
    logits = states.float() @ weight.bfloat16().float().T / temperature
    return logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
