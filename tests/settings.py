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


def digits_overrides(task, url):
    """The quickstart's DAG on the digits task, as overrides of the shipped config."""
    return [
        f"run.url={url}",
        f"data.url={task.train}",
        "data.prepare=null",
        f"model.path={task.model}",
        "rewards.function=siirl_dask.tasks.sorting:digit_fraction",
        "rollout.engine=transformers",
        "rollout.max_response_length=8",
        "data.batch_size=8",
        "rollout.n=4",
        "algorithm.minibatches=2",
        "trainer.lr=2e-3",
        "validation.url=null",
        "validation.test_url=null",
        "observe.progress=false",
        "observe.plot=false",
        "run.steps=3",
    ]
