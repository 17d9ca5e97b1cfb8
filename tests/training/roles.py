"""A policy and a critic of one worker, built as a run builds them."""

from siirl_dask.config import Dtype, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.training import build_critic, build_trainer


def policy(
    folder, config, *, temperature=1.0, rank=None, dtype=Dtype.float32, images=None, replay=False
):
    model = ModelConfig(path=str(folder), dtype=dtype)
    rollout = RolloutConfig(temperature=temperature, router_replay=replay)
    return build_trainer(
        Device("w0"), rank or Rank(), model=model, trainer=config, rollout=rollout, images=images
    )


def critic(folder, config, rank=None, images=None):
    model = ModelConfig(path=str(folder))
    return build_critic(Device("w0"), rank or Rank(), model=model, trainer=config, images=images)
