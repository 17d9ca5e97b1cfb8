"""The configuration of a run: typed groups, filled from YAML and ``key=value`` overrides and
checked when made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from siirl_dask.config.agents import AgentConfig, check_adapters, check_agents
from siirl_dask.config.checks import check_location, parse_bytes, parse_ports
from siirl_dask.config.cluster import Affinity, ClusterConfig, DevicePreference
from siirl_dask.config.data import DataConfig, DataSource, Durability, StorageConfig, TransportMode
from siirl_dask.config.endpoint import EndpointConfig
from siirl_dask.config.engines import (
    Engine,
    Sampler,
    ServerConfig,
    SglangConfig,
    VllmConfig,
    changed_options,
)
from siirl_dask.config.environments import EnvironmentsConfig, OnToolError
from siirl_dask.config.images import ImagesConfig
from siirl_dask.config.megatron import MEGATRON_OPERATORS, MegatronConfig
from siirl_dask.config.model import Dtype, ModelConfig
from siirl_dask.config.observe import MetricsBackend, ObserveConfig, ProfileConfig
from siirl_dask.config.rollout import (
    PromptPlacement,
    RewardsConfig,
    RolloutConfig,
    WeightSync,
)
from siirl_dask.config.run import CheckpointConfig, OnNan, RunConfig, ValidationConfig
from siirl_dask.config.training import (
    ENGINES_LOGPROBS,
    LAYOUT_GROUPS,
    AlgorithmConfig,
    Backend,
    FsdpConfig,
    LoraConfig,
    OptimizerName,
    Schedule,
    TrainerConfig,
    VisionPart,
)
from siirl_dask.config.window import check_window
from siirl_dask.devices.profile_level import ProfileLevel
from siirl_dask.errors import ConfigError

__all__ = [
    "ENGINES_LOGPROBS",
    "LAYOUT_GROUPS",
    "MEGATRON_OPERATORS",
    "Affinity",
    "AgentConfig",
    "AlgorithmConfig",
    "Backend",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DataSource",
    "DevicePreference",
    "Dtype",
    "Durability",
    "EndpointConfig",
    "Engine",
    "EnvironmentsConfig",
    "FsdpConfig",
    "ImagesConfig",
    "LoraConfig",
    "MegatronConfig",
    "MetricsBackend",
    "ModelConfig",
    "ObserveConfig",
    "OnNan",
    "OnToolError",
    "OptimizerName",
    "ProfileConfig",
    "ProfileLevel",
    "PromptPlacement",
    "RewardsConfig",
    "RolloutConfig",
    "RunConfig",
    "Sampler",
    "Schedule",
    "ServerConfig",
    "SglangConfig",
    "StorageConfig",
    "TrainerConfig",
    "TransportMode",
    "ValidationConfig",
    "VisionPart",
    "VllmConfig",
    "WeightSync",
    "changed_options",
    "check_adapters",
    "check_location",
    "file",
    "parse_bytes",
    "parse_ports",
]


@dataclass(kw_only=True, slots=True)
class Config:
    """All groups of a configuration. ConfigError for values that contradict each other."""

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    environments: EnvironmentsConfig = field(default_factory=EnvironmentsConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    critic: TrainerConfig = field(default_factory=TrainerConfig)
    """Training of the critic, if the DAG has one."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    agents: dict[str, AgentConfig] = field(default_factory=dict)
    """Agents of a run with several, by name, in the order in which they act."""

    def __post_init__(self) -> None:
        if self.rollout.max_staleness or self.rollout.partial:
            for algorithm in (self.algorithm, *(agent.algorithm for agent in self.agents.values())):
                if algorithm.old_logprobs != ENGINES_LOGPROBS and not algorithm.correction:
                    algorithm.correction = "siirl_dask.algorithms:truncated_is"
        if self.algorithm.minibatches > self.data.batch_size:
            raise ConfigError(
                f"algorithm.minibatches={self.algorithm.minibatches}: expected at most "
                f"data.batch_size={self.data.batch_size}, one prompt each"
            )
        if self.cluster.elastic and not self.checkpoint.every:
            raise ConfigError(
                "cluster.elastic=true with checkpoint.every=0: a run takes workers in with a "
                "checkpoint; expected checkpoint.every of at least 1"
            )
        own = {f"agents.{name}.trainer": agent.trainer for name, agent in self.agents.items()}
        for name, trainer in {"trainer": self.trainer, "critic": self.critic, **own}.items():
            if trainer.max_skipped_steps and self.run.on_nan is OnNan.stop:
                raise ConfigError(
                    f"{name}.max_skipped_steps={trainer.max_skipped_steps} with run.on_nan=stop, "
                    "which skips none: set run.on_nan=skip as well, or leave it out"
                )
        self._fill_total_steps(
            self.trainer, self.algorithm, self.run.steps - self.algorithm.critic_warmup_steps
        )
        self._fill_total_steps(self.critic, self.algorithm, self.run.steps)
        for agent in self.agents.values():
            self._fill_total_steps(
                agent.trainer, agent.algorithm, self.run.steps - agent.algorithm.critic_warmup_steps
            )
        self._fill_longest_row()
        check_agents(self.agents, self.rollout, self.data.batch_size)
        check_window(self.rollout, self.data.batch_size, self.algorithm.minibatches)

    def _fill_longest_row(self) -> None:
        """Give each model the longest row of the run, prompt and response, unless
        ``longest_row`` is given.
        """
        models = [self.model]
        longest_response = self.rollout.max_response_length
        for agent in self.agents.values():
            models.append(agent.model)
            longest_response = max(longest_response, agent.rollout.max_response_length)
        for model in models:
            if model.longest_row is None:
                model.longest_row = self.data.max_prompt_length + longest_response

    def _fill_total_steps(
        self,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig,
        steps: int,
    ) -> None:
        """Let a learning rate that falls do so until the end of the run, unless ``total_steps``
        is given.
        """
        if trainer.schedule != Schedule.constant and trainer.total_steps is None:
            trainer.total_steps = max(1, steps) * algorithm.minibatches * algorithm.epochs
