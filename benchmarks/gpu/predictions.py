"""Predictions for one H100, written before any GPU had run this code, each with the figure that
it is held against.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_PREDICTION = "none"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the page's table: a value of a figure, and what was expected of it."""

    figure: str
    """The line of results with this ``figure``."""
    key: str
    """The value in that line."""
    label: str
    prediction: str = NO_PREDICTION
    percent: bool = False


_LAUNCHES = "25 to 30, whatever the rows: launches bound it"
_PLAN = "within 10 % of the plan's"
ROWS = (
    Row("ceilings", "matmul_tflops", "ceiling: a product of bfloat16 matrices, TFLOP/s"),
    Row("ceilings", "copy_gb_s", "ceiling: a copy in the device's memory, read and written, GB/s"),
    Row("decode/16", "ms_per_token", "transformers engine, 16 rows: ms a token", _LAUNCHES),
    Row("decode/64", "ms_per_token", "transformers engine, 64 rows: ms a token", _LAUNCHES),
    Row("decode/256", "ms_per_token", "transformers engine, 256 rows: ms a token", _LAUNCHES),
    Row("decode/256", "tokens_s", "transformers engine, 256 rows: tokens/s", "about 9,000"),
    Row(
        "profile/decode", "busy_share", "the device is busy while 4 rows are decoded", percent=True
    ),
    Row("train/torch", "logprobs_tokens_s", "`torch`: log-probs, tokens/s", "220,000 to 390,000"),
    Row("train/torch", "update_tokens_s", "`torch`: update, tokens/s", "66,000 to 117,000"),
    Row("train/torch", "mfu", "`torch`: MFU of the update", "22 to 36 %", percent=True),
    Row("train/torch", "peak_gib", "`torch`: peak of memory, GiB", _PLAN),
    Row("train/torch", "plan_gib", "`torch`: the plan's, GiB"),
    Row(
        "profile/update-torch",
        "busy_share",
        "`torch`: the device is busy in an update",
        percent=True,
    ),
    Row("train/fsdp", "logprobs_tokens_s", "`fsdp`: log-probs, tokens/s"),
    Row(
        "train/fsdp",
        "update_tokens_s",
        "`fsdp`: update, tokens/s",
        "0.9 to 1.1 times that of `torch`",
    ),
    Row("train/fsdp", "mfu", "`fsdp`: MFU of the update", percent=True),
    Row("train/fsdp", "peak_gib", "`fsdp`: peak of memory, GiB", _PLAN),
    Row("train/fsdp", "plan_gib", "`fsdp`: the plan's, GiB"),
    Row(
        "profile/update-fsdp", "busy_share", "`fsdp`: the device is busy in an update", percent=True
    ),
    Row(
        "train/torch, 4k tokens",
        "update_tokens_s",
        "`torch`, 4k tokens a micro-batch: update, tokens/s",
    ),
    Row(
        "train/torch, recomputation",
        "update_tokens_s",
        "`torch`, gradient checkpointing: update, tokens/s",
    ),
    Row(
        "train/torch, recomputation",
        "peak_gib",
        "`torch`, gradient checkpointing: peak of memory, GiB",
        _PLAN,
    ),
    Row(
        "train/torch, recomputation", "plan_gib", "`torch`, gradient checkpointing: the plan's, GiB"
    ),
    Row("train/torch, liger", "update_tokens_s", "`torch`, Liger's kernels: update, tokens/s"),
    Row("train/torch, liger", "peak_gib", "`torch`, Liger's kernels: peak of memory, GiB"),
    Row("sampler/plain", "ms", "sampler, 256 rows of 151,936 logits: ms", "0.6 to 1.0"),
    Row("sampler/top_p", "ms", "sampler with `top_p` 0.95: ms"),
    Row("sampler/top_k", "ms", "sampler with `top_k` 50: ms"),
    Row("sampler/any-batch", "equal", "a row's token is the same alone and among 256", "yes"),
    Row(
        "plain/train", "logprobs_tokens_s", "transformers without this package: log-probs, tokens/s"
    ),
    Row("plain/train", "update_tokens_s", "transformers without this package: update, tokens/s"),
    Row("plain/decode", "ms_per_token", "`model.generate`, 64 rows: ms a token"),
    Row("trl", "step_s", "TRL's GRPOTrainer, 64 rows of 128 + 384 tokens: seconds of steps"),
    Row("trl", "peak_gib", "TRL's GRPOTrainer: peak of memory, GiB"),
)
"""Figures in the order of the page. The plan's peak is computed on the machine, so its
prediction is a share of it."""
