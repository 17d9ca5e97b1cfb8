"""Configuration groups from flat settings, for tests that vary one setting among many."""

from dataclasses import fields

from siirl_dask.config import FsdpConfig, LoraConfig, RolloutConfig, TrainerConfig, VllmConfig


def trainer_config(**settings) -> TrainerConfig:
    """``sequence_parallel=2`` is an option of ``fsdp``, ``lora_rank=4`` is ``lora.rank``."""
    fsdp = _taken(settings, {field.name: field.name for field in fields(FsdpConfig)})
    lora = _taken(settings, {f"lora_{field.name}": field.name for field in fields(LoraConfig)})
    return TrainerConfig(**settings, fsdp=FsdpConfig(**fsdp), lora=LoraConfig(**lora))


def rollout_config(**settings) -> RolloutConfig:
    """``kv_cache_memory="1MiB"`` is an option of ``vllm``."""
    vllm = _taken(settings, {field.name: field.name for field in fields(VllmConfig)})
    return RolloutConfig(**settings, vllm=VllmConfig(**vllm))


def _taken(settings, names):
    return {names[name]: settings.pop(name) for name in list(settings) if name in names}
