"""SGLang's server arguments: some of the 500, by name, type and default. Others are a TypeError,
as they are there.
"""

from dataclasses import dataclass

DETERMINISTIC_ATTENTION_BACKEND_CHOICES = [
    "ascend",
    "fa3",
    "fa4",
    "flashinfer",
    "intel_xpu",
    "triton",
]


@dataclass(kw_only=True)
class ServerArgs:
    model_path: str
    dtype: str = "auto"
    device: str | None = None
    base_gpu_id: int = 0
    tp_size: int = 1
    skip_tokenizer_init: bool = False
    enable_deterministic_inference: bool = False
    attention_backend: str | None = None
    sampling_backend: str | None = None
    disable_radix_cache: bool = False
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    enable_memory_saver: bool = False
    enable_fp32_lm_head: bool = False
    chunked_prefill_size: int | None = None
    stream_interval: int = 1
    random_seed: int | None = None
    log_level: str = "info"

    def check_server_args(self):
        backend = self.attention_backend
        if (
            self.enable_deterministic_inference
            and backend
            and backend not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES
        ):
            raise ValueError(
                f"Currently only {DETERMINISTIC_ATTENTION_BACKEND_CHOICES} attention backends are "
                "supported"
            )
