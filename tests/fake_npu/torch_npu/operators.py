"""Fused operators, by what torch_npu's documentation says that they compute, and with what it
says that they refuse.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from torch_npu.calls import count

_HALVES = (torch.float16, torch.bfloat16)
_WIDE = (*_HALVES, torch.float32)


def _check(name, *tensors, types=_WIDE):
    count(name)
    for each in tensors:
        if each.device.type != "npu":
            raise RuntimeError(f"{name}: expected a tensor on an npu, got {each.device}")
        if each.dtype not in types:
            raise RuntimeError(f"{name}: {each.dtype} is not supported")


def npu_rotary_mul(input, r1, r2, rotary_mode="half"):
    """Rotate halves: ``r1 * x + r2 * (-x2, x1)``. [B, N, S, D], and [1, 1, S, D] twice."""
    _check("npu_rotary_mul", input, r1, r2)
    if (
        not all(each.dim() == 4 for each in (input, r1, r2))
        or input.shape[-1] % 2
        or input.shape[-1] >= 896
    ):
        raise RuntimeError(
            f"npu_rotary_mul: expected 4 dimensions, the last even and below 896, got {input.shape}"
        )
    if len({each.dtype for each in (input, r1, r2)}) > 1:
        raise RuntimeError("npu_rotary_mul: expected one type")
    first, second = input.chunk(2, -1)
    return r1 * input + r2 * torch.cat([-second, first], dim=-1)


def npu_rms_norm(self, gamma, epsilon=1e-6):
    """``x / rms(x) * gamma`` computed in float32, and ``1 / rms(x)``."""
    _check("npu_rms_norm", self, gamma)
    if self.dtype != gamma.dtype:
        raise RuntimeError(f"npu_rms_norm: expected one type, got {self.dtype} and {gamma.dtype}")
    wide = self.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(self.dtype), rstd


def npu_swiglu(self, dim=-1):
    """``silu(first half) * second half``."""
    _check("npu_swiglu", self)
    if self.shape[dim] % 2:
        raise RuntimeError(f"npu_swiglu: expected an even size, got {self.shape}")
    gate, up = self.chunk(2, dim)
    return silu(gate) * up


def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=2147483647,
    next_tockens=2147483647,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
):
    """Attention of rows in one tensor, layout TND, causal (mode 2 or 3, which differ where a row
    has more keys than queries) or in a band (mode 4). [T, N, D] three times.
    """
    _check("npu_fusion_attention", query, key, value)
    lengths = [actual_seq_qlen, actual_seq_kvlen]
    if (
        input_layout != "TND"
        or not all(isinstance(each, list | tuple) for each in lengths)
        or keep_prob != 1.0
    ):
        raise RuntimeError(
            "npu_fusion_attention: the stand-in takes TND with lengths on the host, and no dropout"
        )
    if sparse_mode not in (2, 3, 4) or atten_mask is None or atten_mask.shape != (2048, 2048):
        raise RuntimeError(
            "npu_fusion_attention: modes 2 to 4 take the compressed mask [2048, 2048]"
        )
    if (
        atten_mask.dtype not in (torch.bool, torch.uint8)
        or not bool(atten_mask[0, 1])
        or bool(atten_mask[1, 0])
    ):
        raise RuntimeError("npu_fusion_attention: expected a mask that is true above the diagonal")
    if head_num != query.shape[1] or query.shape[1] % key.shape[1]:
        raise RuntimeError(
            f"npu_fusion_attention: head_num={head_num} for {query.shape[1]} and {key.shape[1]} "
            "heads"
        )
    if len({each.dtype for each in (query, key, value)}) > 1 or query.shape[-1] > 768:
        raise RuntimeError("npu_fusion_attention: expected one type, and heads up to 768")
    if actual_seq_qlen[-1] != query.shape[0] or actual_seq_kvlen[-1] != key.shape[0]:
        raise RuntimeError("npu_fusion_attention: lengths do not end with the number of tokens")
    outputs, start = [], 0
    for stop in actual_seq_qlen:
        q, k, v = (each[start:stop].transpose(0, 1)[None] for each in (query, key, value))
        distance = torch.arange(stop - start, device=query.device)
        distance = distance[:, None] - distance
        mask = (distance >= (0 if sparse_mode in (2, 3) else -next_tockens)) & (
            distance <= (pre_tockens if sparse_mode == 4 else stop - start)
        )
        one = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(one[0].transpose(0, 1))
        start = stop
    return torch.cat(outputs), None, None, None, 0, 0, 0


@torch.no_grad()
def npu_apply_adam_w(
    beta1_power,
    beta2_power,
    lr,
    weight_decay,
    beta1,
    beta2,
    epsilon,
    grad,
    max_grad_norm,
    amsgrad,
    maximize,
    *,
    out,
):
    """AdamW in place on ``out``, the parameter and its two moments. The powers are those of the
    step before.
    """
    parameter, first, second = out
    _check("npu_apply_adam_w", parameter, first, second, grad)
    parameter.mul_(1 - lr * weight_decay)
    first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    wide = (second / (1 - beta2_power * beta2)).sqrt_().add_(epsilon)
    parameter.addcdiv_(first / (1 - beta1_power * beta1), wide, value=-lr)
    return parameter, first, second
