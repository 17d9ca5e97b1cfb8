"""SGLang's sampling with ``enable_deterministic_inference``: ``sampling_params.py``,
``layers/sampler.py`` and ``murmur_hash.py`` of the wheel, for one row at a time.
"""

from dataclasses import dataclass

import torch

TOP_K_ALL = 1 << 30
_MASK = 0xFFFFFFFF


@dataclass(kw_only=True)
class SamplingParams:
    max_new_tokens: int | None = 128
    stop_token_ids: list | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_ALL
    min_p: float = 0.0
    ignore_eos: bool = False
    sampling_seed: int | None = None

    def __post_init__(self):
        if 0 <= self.temperature < 1e-6:
            self.temperature, self.top_k = 1.0, 1
        if self.top_k == -1:
            self.top_k = TOP_K_ALL
        if not 0 < self.top_p <= 1 or self.top_k < 1 or self.temperature < 0:
            raise ValueError(f"{self}")
        if self.sampling_seed is not None and not -(2**63) <= self.sampling_seed <= 2**63 - 1:
            raise ValueError(
                f"sampling_seed must be in [-2**63, 2**63 - 1], got {self.sampling_seed}."
            )

    @property
    def greedy(self):
        return self.top_k <= 1


def sample(logits, params, position, *, all_greedy):
    """Return a token and its log-probability. [V]; ``all_greedy`` is whether all rows of the
    batch are.
    """
    if all_greedy:
        logprobs = torch.log_softmax(logits, -1)
        return int(logits.argmax()), float(logprobs[int(logits.argmax())])
    scaled = logits / params.temperature
    logprobs, probs = torch.log_softmax(scaled, -1), torch.softmax(scaled, -1)
    seed = 42 if params.sampling_seed is None else params.sampling_seed
    if params.top_p == 1 and params.top_k == TOP_K_ALL and params.min_p == 0:
        token = multinomial_with_seed(torch.log(probs), seed, position)
        return token, float(logprobs[token])
    probs_sort, probs_idx = probs.sort(descending=True)
    probs_sum = torch.cumsum(probs_sort, -1)
    probs_sort[torch.arange(len(probs)) >= params.top_k] = 0.0
    probs_sort[(probs_sum - probs_sort) > params.top_p] = 0.0
    assert params.min_p == 0, "With sampling seed, multinomial_with_seed will provide wrong results"
    token = int(
        probs_idx[multinomial_with_seed(probs_sort.to(torch.float64).log_(), seed, position)]
    )
    return token, float(logprobs[token])


def multinomial_with_seed(logprobs, seed, position):
    hashed = murmur_hash32(seed % 2**64, position, torch.arange(len(logprobs)))
    x = hashed.to(torch.float64) / _MASK
    x.log_().clamp_(min=torch.finfo(x.dtype).min, max=-(2.0**-32)).neg_()
    x.log_().neg_()
    return int(torch.argmax(x + logprobs.to(torch.float64)))


def murmur_hash32(seed, position, columns):
    h = torch.zeros_like(columns)
    for block in (seed & _MASK, seed >> 32, position, columns):
        h = _mix(h, torch.as_tensor(block, dtype=torch.int64) & _MASK)
    h = h ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & _MASK
    return h ^ (h >> 16)


def _mix(h, k):
    k = (_rotl((k * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotl(h ^ k, 13) * 5 + 0xE6546B64) & _MASK


def _rotl(x, r):
    return ((x << r) | (x >> (32 - r))) & _MASK
