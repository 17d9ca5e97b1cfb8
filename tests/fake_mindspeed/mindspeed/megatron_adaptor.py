"""Patches megatron-core as it is imported, and again by ``repatch``; records both."""

import importlib
import sys

import torch
import torch_npu

TOO_LATE = "megatron.core" in sys.modules
from mindspeed.args_utils import get_full_args  # noqa: E402

repatched = []
"""Arguments of each call of ``repatch``."""
_NORM, _ATTENTION = (
    "megatron.core.transformer.torch_norm",
    "megatron.core.transformer.dot_product_attention",
)
_ROPE, _SWIGLU = (
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.fusions.fused_bias_swiglu",
)


class PTNorm:
    def __new__(cls, config, hidden_size, eps=1e-5):
        if config.normalization != "RMSNorm":
            raise ValueError(config.normalization)
        return RMSNorm(hidden_size, eps)


class RMSNorm(torch.nn.Module):
    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden):
        return torch_npu.npu_rms_norm(hidden, self.weight, epsilon=self.epsilon)[0]


def apply_rotary_pos_emb_bshd(
    t, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0, **others
):
    cos, sin = ((each * mscale).to(t.dtype) for each in (freqs.cos(), freqs.sin()))
    return torch_npu.npu_rotary_mul(t.contiguous(), cos, sin)


class SwiGLUFunction:
    @staticmethod
    def apply(x, *args):
        return torch_npu.npu_swiglu(x, dim=-1)


def attend(
    self,
    query,
    key,
    value,
    attention_mask,
    attn_mask_type=None,
    attention_bias=None,
    packed_seq_params=None,
):
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd" or query.dim() != 3:
        raise ValueError("the stand-in takes rows of several lengths")
    return torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=attention_mask,
        scale=self.softmax_scale,
        pre_tockens=self.config.pre_tockens,
        next_tockens=self.config.next_tockens,
        keep_prob=1 - self.attention_dropout.p,
        sparse_mode=self.config.sparse_mode,
        actual_seq_qlen=packed_seq_params.cu_seqlens_q.tolist(),
        actual_seq_kvlen=packed_seq_params.cu_seqlens_kv.tolist(),
    )[0]


def _everywhere(module, name, replacement):
    original = getattr(importlib.import_module(module), name)
    for one in [*sys.modules.values()]:
        for own, value in [*getattr(one, "__dict__", {}).items()]:
            if value is original and own != "__class__" and one.__name__.startswith("megatron"):
                setattr(one, own, replacement)


def _patch(arguments):
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    core = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    for name in ("pre_tockens", "next_tockens"):
        setattr(core, name, getattr(arguments, name))
    _everywhere(_NORM, "WrappedTorchNorm", PTNorm)
    _everywhere(_SWIGLU, "SwiGLUFunction", SwiGLUFunction)
    if arguments.use_fused_rotary_pos_emb:
        if arguments.position_embedding_type != "rope":
            raise AssertionError(
                "--use-fused-rotary-pos-emb must enable with --position-embedding-type=rope"
            )
        _everywhere(_ROPE, "_apply_rotary_pos_emb_bshd", apply_rotary_pos_emb_bshd)
    if getattr(arguments, "use_flash_attn", False):
        if arguments.sparse_mode not in (0, 2):
            raise AssertionError("When use_flash_attn, only supports sparse modes 0 and 2")
        importlib.import_module(_ATTENTION).DotProductAttention.forward = attend


def repatch(args):
    repatched.append(dict(args))
    for name, value in args.items():
        setattr(get_full_args(), name, value)
    _patch(get_full_args())


_patch(get_full_args())
