"""Options of the engine and of the run."""

from __future__ import annotations

from siirl_dask.commands.migrate.option import always, none, rule

_A, _R, _M, _F = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))

ROLLOUT = (
    rule(f"{_R}.name", "rollout.engine", "hf is transformers"),
    rule(f"{_R}.n", "rollout.n", "1 by default there"),
    rule(f"{_R}.temperature", "rollout.temperature"),
    rule(f"{_R}.top_p", "rollout.top_p"),
    rule(f"{_R}.top_k", "rollout.top_k", "-1, all tokens, is 0 here"),
    rule(f"{_R}.min_p", "rollout.min_p"),
    rule(f"{_R}.do_sample", "", "true is how it is"),
    rule(f"{_R}.tensor_model_parallel_size", "rollout.tensor_parallel_size", "2 by default in verl"),
    rule(f"{_R}.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization"),
    rule(f"{_R}.enforce_eager", "rollout.vllm.enforce_eager"),
    rule(f"{_R}.enable_prefix_caching", "rollout.vllm.enable_prefix_caching"),
    rule(f"{_R}.max_num_seqs", "rollout.max_rows", "rows of an engine there, of a worker here"),
    rule(f"{_R}.max_num_batched_tokens", "rollout.vllm.max_num_batched_tokens"),
    rule(f"{_R}.enable_rollout_routing_replay", "rollout.router_replay", "with engines of one worker"),
    rule(f"{_R}.free_cache_engine", "rollout.vllm.sleep_level", "false is 0"),
    rule(f"{_R}.max_model_len {_R}.enable_chunked_prefill {_R}.engine_kwargs.vllm.*",
          "rollout.vllm.engine_kwargs"),
    rule(f"{_R}.dtype", "model.dtype", "engine and trainer compute in one type"),
    rule(f"{_R}.val_kwargs.n", "validation.n"),
    rule(f"{_R}.val_kwargs.temperature {_R}.val_kwargs.do_sample", "validation.temperature", "0 without do_sample, "
          "as by default there"),
    rule(f"{_R}.val_kwargs.top_p", "validation.top_p"),
    rule(f"{_R}.checkpoint_engine.update_weights_bucket_megabytes {_R}.update_weights_bucket_megabytes",
          "rollout.weight_bucket"),
    always(f"{_R}.mode {_R}.load_format {_R}.layered_summon {_R}.disable_log_stats {_R}.skip_tokenizer_init "
            f"{_R}.calculate_log_probs {_R}.logprobs_mode {_R}.multi_stage_wake_up {_R}.n_gpus_per_node {_R}.nnodes",
            "engines get the policy's weights in buckets and give the log-prob of every token"),
    always(f"{_R}.log_prob_* {_F}.log_prob_*", "log-probs have the bound of the update, "
            "trainer.max_tokens_per_micro_batch"),
    always(f"{_R}.agent.num_workers", "episodes run in the workers of their role"),
    none(f"{_R}.val_kwargs.top_k {_R}.val_kwargs.*", "validations sample with validation.temperature and "
          "validation.top_p"),
    none(f"{_R}.ignore_eos", "a response ends at an end token", decides="rollout.max_response_length"),
    none(f"{_R}.repetition_penalty {_R}.presence_penalty {_R}.frequency_penalty {_R}.stop*", "sampling is that of "
          "the policy, so that log-probs are its own", decides="rollout.temperature"),
    none(f"{_R}.seed {_R}.full_determinism", "each row has a seed of its own, from run.seed: samples are the same "
          "on any layout"),
    rule(f"{_R}.agent.default_agent_loop", "", "single_turn_agent is how it is"),
    none(f"{_R}.multi_turn.enable {_R}.multi_turn.tool_config_path {_R}.multi_turn.function_tool_path "
          f"{_R}.multi_turn.interaction_config_path {_R}.agent.agent_loop_config_path "
          f"{_R}.agent.agent_loop_manager_class", "turns are an "
          "environment: dags/turns.yaml and environments.*, see docs/turns.md", decides="rollout.engine"),
    none(f"{_R}.multi_turn.* {_R}.agent.*", "turns are an environment: dags/turns.yaml and environments.*, see "
          "docs/turns.md"),
    none(f"{_R}.engine_kwargs.*", "arguments of another engine than vLLM"),
    none(f"{_R}.data_parallel_size {_R}.expert_parallel_size {_R}.pipeline_model_parallel_size",
          "an engine is rollout.tensor_parallel_size workers; each other group of workers is an engine of its own"),
    none(f"{_R}.quantization* {_R}.qat {_R}.mtp*", "engines compute with the policy's own weights"),
    none(f"{_R}.profiler.*", "profile.roles has the engine's role, with one setting for all"),
    none(f"{_R}.prometheus.* {_R}.trace.*", "see docs/monitoring.md and siirl-dask trace"),
    none(f"{_R}.over_sample_rate", "rollout.window is its number of prompts, which go on in the next step instead of "
          "being dropped"),
    none(f"{_R}.*", "there is no such option of an engine"),
    rule(f"{_F}.fsdp_config.param_offload", "trainer.park", "where the policy's offload "
          "asks for it as well: a reference follows the policy"),
    always(f"{_F}.strategy {_F}.fsdp_config.* {_F}.ulysses_sequence_parallel_size {_F}.use_torch_compile "
            f"{_F}.entropy_* {_F}.rollout_n {_F}.use_remove_padding {_F}.megatron.*", "a reference is laid out as the "
            "policy is"),
    none(f"{_F}.*", "a reference has no options of its own"),
    always("actor_rollout_ref.hybrid_engine", "true is cluster.placement={}: every role on every worker"),
    none("actor_rollout_ref.*_timeout", "a hung collective is found by run.node_timeout and "
          "cluster.stall_timeout"),
    none("actor_rollout_ref.embodied.*", "there are no vision-language-action models"),
)  # fmt: skip

TRAINER = (
    rule("trainer.nnodes trainer.n_gpus_per_node", "cluster.workers", "a worker for each device"),
    rule("trainer.total_training_steps", "run.steps"),
    rule("trainer.total_epochs", "run.steps", "x rows / train_batch_size, where total_training_steps is not given"),
    rule("trainer.project_name", "observe.project"),
    rule("trainer.experiment_name", "run.name"),
    rule("trainer.logger", "observe.backends, observe.progress", "console is the progress bar"),
    rule("trainer.save_freq", "checkpoint.every", "-1 is 0: none, and the model is lost at the end"),
    rule("trainer.test_freq", "validation.every", "-1: before the first step and after the last alone"),
    rule("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    rule("trainer.default_local_dir", "run.url", "all of a run is in one folder, checkpoints among it"),
    rule("trainer.critic_warmup", "algorithm.critic_warmup_steps"),
    rule("trainer.device", "cluster.device", "cpu; others are found"),
    rule("trainer.val_before_train", "", "true is how it is, where validation.url is given"),
    rule("trainer.resume_mode", "", "auto is how it is; for disable type siirl-dask run --fresh"),
    always("trainer.balance_batch", "rows are balanced by tokens over workers"),
    always("trainer.rollout_data_dir trainer.validation_data_dir trainer.log_val_generations", "every sample is "
            "kept: siirl-dask rollouts RUN"),
    always("trainer.ray_wait_register_center_timeout ray_kwargs.* ray_init.* transfer_queue.*", "there is no Ray "
            "and no buffer process"),
    always("trainer.should_log trainer.del_local_ckpt_after_load trainer.use_v1 "
            "trainer.remove_previous_ckpt_in_save trainer.max_critic_ckpt_to_keep", "a checkpoint has policy and "
            "critic, and checkpoint.keep of them stay"),
    none("trainer.val_only", "type siirl-dask eval MODEL --data URL", decides="run.steps"),
    none("trainer.resume_from_path", "a run resumes from its own folder; model.path=RUN@STEP begins with the weights "
          "of another one"),
    none("trainer.default_hdfs_dir", "run.url may be any fsspec URL"),
    rule("trainer.v1.trainer_mode", "", "sync is how it is"),
    rule("rollout.nnodes rollout.n_gpus_per_node", "cluster.workers", "devices that generate alone, of the programs "
          "one_step_off_policy and fully_async_policy: cluster.placement"),
    rule("async_training.require_batches async_training.trigger_parameter_sync_step", "data.batch_size",
          "their product x ppo_mini_batch_size: a step is what is trained on between two loads of weights"),
    rule("async_training.staleness_threshold", "rollout.max_staleness", "whole steps here: 0.1 is 1"),
    rule("rollout.total_rollout_steps", "run.steps", "prompts in all, with async_training.*"),
    rule("rollout.test_freq", "validation.every", "where trainer.test_freq is not given"),
    rule("async_training.use_rollout_log_probs actor_rollout_ref.actor.use_rollout_log_probs",
          "algorithm.old_logprobs", "of these programs: true, their default, is rollout_logprobs"),
    none("async_training.partial_rollout", "rollout.partial goes on with a response in the next step"),
    none("trainer.v1.* async_training.*", "generation ahead of training is rollout.max_staleness"),
    none("trainer.esi_redundant_time", "a run that gets SIGTERM has run.grace"),
    none("trainer.*", "there is no such option of a run"),
)  # fmt: skip

REST = (
    rule("profiler.enable profiler.profile_steps global_profiler.steps global_profiler.tool", "profile.steps",
          "steps count from 1 here, and from 0 in siiRL"),
    rule("profiler.ranks profiler.all_ranks", "profile.ranks"),
    rule("profiler.roles", "profile.roles", "siiRL's nodes as the roles that run them"),
    rule("profiler.level profiler.with_memory profiler.record_shapes profiler.with_stack profiler.with_module",
          "profile.level", "time, memory or stacks"),
    always("profiler.save_path global_profiler.save_path profiler.with_npu profiler.with_cpu profiler.analysis "
            "profiler.discrete", "traces are in the run's folder, a file a worker, node and step"),
    none("profiler.* global_profiler.*", "torch's profiler and torch_npu's are the tools: profile.* says when"),
    none("dag.workflow_path dag.custom_pipeline_fn", "a DAG is written in YAML or Python: docs/dags.md"),
    none("dag.*", "the plan follows from the DAG: siirl-dask plan"),
    none("distillation.enabled", "there is no teacher whose log-probs a policy learns", decides="algorithm.loss"),
    none("distillation.* skip.* sandbox.*", "there is no such part"),
    none("hydra.* defaults hydra", "Hydra composes no file here: base: names another one"),
)  # fmt: skip
