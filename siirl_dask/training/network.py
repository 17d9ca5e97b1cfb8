"""A causal model from a Hugging Face folder that scores packed rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from siirl_dask.config import Dtype, ModelConfig
from siirl_dask.errors import ConfigError
from siirl_dask.pretrained import load_pretrained
from siirl_dask.training.attention import PACKED
from siirl_dask.training.logprobs import token_logprobs
from siirl_dask.training.packing import MicroBatch, micro_batches
from siirl_dask.training.trainer import PackedRows, TokenScores


class PackedNetwork:
    """Parameters are float32 whatever ``model.dtype`` is: with bfloat16 only the arithmetic is (autocast), because an
    update of 1e-6 is lost on a bfloat16 number. Dropout is off: the policy that is trained is the one that sampled.
    """

    def __init__(self, config: ModelConfig, *, temperature: float, device: str) -> None:
        self.device = torch.device(device)
        self.temperature = temperature
        self.dtype: torch.dtype = torch.bfloat16 if config.dtype is Dtype.bfloat16 else torch.float32
        what = f"model.path={config.path!r}"
        self.model = load_pretrained(AutoModelForCausalLM, config.path, torch.float32, what).to(self.device).eval()  # type: ignore[arg-type]  # a decorator hides its type
        _use_packed_attention(self.model, config.path)

    def scores(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of a micro-batch's response tokens. [K], [K]."""
        if not len(batch.targets):
            return torch.zeros(0, device=self.device), torch.zeros(0, device=self.device)
        head = self.model.get_output_embeddings()
        return token_logprobs(
            self.predicting_states(batch).to(self.dtype),
            head.weight,
            head.bias,
            batch.targets.to(self.device),
            temperature=self.temperature,
        )

    def predicting_states(self, batch: MicroBatch) -> Tensor:
        """Last hidden state of the token before each response token. [K, D]."""
        if not len(batch.targets):
            return torch.zeros(0, self.model.get_output_embeddings().in_features, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden = _hidden(self.model, batch, self.device)
        return hidden[batch.predicting.to(self.device)]

    @torch.no_grad()
    def score_all(self, rows: PackedRows, budget: int) -> TokenScores:
        """Every response token, without gradient, ``budget`` tokens at a time."""
        parts = [self.scores(batch) for batch in micro_batches(rows, budget)]
        logprobs, entropy = (torch.cat(values).cpu() for values in zip(*parts, strict=True))
        return TokenScores(logprobs, entropy)


def _hidden(model: PreTrainedModel, batch: MicroBatch, device: torch.device) -> Tensor:
    """Last hidden states, [T, D]. An attention mask or a cache would silently mix the rows (log-probs off by 0.5)."""
    output = model.get_decoder()(
        input_ids=batch.input_ids.to(device),
        position_ids=batch.position_ids.to(device),
        attention_mask=None,
        use_cache=False,
        runs=batch.runs,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


@torch.no_grad()
def _use_packed_attention(model: PreTrainedModel, path: str) -> None:
    """Switch to it, and see on two short rows that the logits stay: a model may do more than we compute (a soft cap on
    its logits, a mask of its own), and training on other numbers than were sampled would go unnoticed.
    """
    device = model.device
    lengths = torch.tensor([2, 3])
    tokens = torch.arange(5) % model.config.get_text_config().vocab_size
    expected = torch.cat([model(row[None].to(device), use_cache=False).logits[0] for row in tokens.split([2, 3])])
    model.set_attn_implementation(PACKED)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    (batch,) = micro_batches(PackedRows(tokens, offsets, torch.ones_like(lengths)), budget=5)
    head: nn.Module = model.get_output_embeddings()
    try:
        packed = head(_hidden(model, batch, device))
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(f"model.path={path!r}: {type(model).__name__} takes no packed rows: {error}") from error
    off = (packed - expected).abs().max().item()
    if not off <= 1e-3 * max(1.0, expected.abs().max().item()):
        raise ConfigError(
            f"model.path={path!r}: logits of {type(model).__name__} from packed rows and a linear head "
            f"are off by {off:.2g}; this trainer supports decoders such as Llama, Qwen2 and Qwen3"
        )
