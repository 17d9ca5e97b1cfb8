"""Options of the model and of its training, by the policy and by a critic."""

from __future__ import annotations

from siirl_dask.commands.migrate.option import Option, always, none, rule

_A, _R, _M, _F = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))

MODEL = (
    rule(f"{_M}.path", "model.path", "a name of the hub, org/name, becomes hf://org/name"),
    rule(f"{_M}.enable_gradient_checkpointing", "trainer.gradient_checkpointing", "true by default there"),
    rule(f"{_M}.lora_rank {_M}.lora.rank", "trainer.lora.rank"),
    rule(f"{_M}.lora_alpha {_M}.lora.alpha", "trainer.lora.alpha"),
    rule(f"{_M}.target_modules", "trainer.lora.targets", "all-linear is the default here"),
    rule(f"{_M}.lora_adapter_path", "trainer.lora.path", "with the adapters' own rank"),
    rule(f"{_M}.use_liger", "trainer.liger"),
    rule(f"{_M}.use_remove_padding", "", "true is how it is: rows are packed without padding"),
    rule(f"{_A}.freeze_vision_tower", "trainer.freeze"),
    always(f"{_M}.use_fused_kernels {_M}.fused_kernel_options*", "log-probs run through the vocabulary in blocks"),
    always(f"{_M}.use_shm {_M}.cache_dir {_M}.use_fast_tokenizer", "it changes where files are read, nothing else"),
    none(f"{_M}.enable_activation_offload {_M}.tiled_mlp*", "activations stay on the device; see "
          "trainer.gradient_checkpointing and trainer.fsdp.sequence_parallel"),
    none(f"{_M}.override_config*", "the model is what its folder's config.json says: change it there"),
    none(f"{_M}.trust_remote_code data.trust_remote_code {_R}.trust_remote_code critic.model.trust_remote_code",
          "code of a model's folder is never run"),
    none(f"{_M}.custom_chat_template {_M}.tokenizer_path {_M}.hf_config_path", "tokenizer, template and config are "
          "those of the model's folder: put them there", decides="model.path"),
    none(f"{_M}.lora.target_modules {_M}.lora.exclude_modules {_M}.exclude_modules {_M}.lora.dropout {_M}.lora.type",
          "adapters are on the layers of trainer.lora.targets, without dropout", decides="trainer.lora.targets"),
    none(f"{_M}.lora.*", "adapters are on the layers of trainer.lora.targets, without dropout"),
    none(f"{_M}.mtp.enable_train", "there are no heads that predict several tokens", decides="algorithm.loss"),
    none(f"{_M}.mtp*", "there are no heads that predict several tokens"),
    none(f"{_M}.*", "there is no such option of a model"),
)  # fmt: skip

ACTOR = (
    rule(f"{_A}.strategy model_engine {_A}.model_engine", "trainer.backend", "fsdp and fsdp2 are fsdp; megatron is "
          "megatron, also where it comes of the name of verl's YAML file"),
    rule(f"{_A}.ppo_mini_batch_size", "algorithm.minibatches", "prompts in a mini-batch there (256 by default), "
          "mini-batches in a step here: train_batch_size / ppo_mini_batch_size"),
    rule(f"{_A}.ppo_epochs", "algorithm.epochs"),
    rule(f"{_A}.use_dynamic_bsz {_A}.ppo_max_token_len_per_gpu {_A}.ppo_micro_batch_size_per_gpu",
          "trainer.max_tokens_per_micro_batch", "tokens of a pass, also where there rows are counted: rows x (prompt + "
          "response)"),
    rule(f"{_A}.grad_clip {_A}.optim.clip_grad {_A}.optim.grad_clip", "trainer.max_grad_norm", "verl 0.9 reads "
          "optim.clip_grad alone, and earlier versions grad_clip: two that differ are asked about"),
    rule(f"{_A}.clip_ratio {_A}.clip_ratio_low {_A}.clip_ratio_high {_A}.clip_ratio_c {_A}.tau_pos {_A}.tau_neg",
          "algorithm.loss_options", "clip_ratio_c, the dual clip, is 3 by default there and absent here; it is written "
          "out"),
    rule(f"{_A}.policy_loss.loss_mode {_A}.use_cpgd_loss {_A}.policy_drift_coeff", "algorithm.loss", "dppo_tv and "
          "dppo_kl are dppo, whose limits are the clip ratios and whose cap is clip_ratio_c; with bypass_mode it is "
          "ppo_clip, whatever loss_mode says"),
    rule(f"{_A}.policy_loss.dro_beta", "algorithm.loss_options", "beta, with loss_mode dro"),
    rule(f"{_A}.policy_loss.clip_cov_* {_A}.policy_loss.kl_cov_ratio {_A}.policy_loss.ppo_kl_coef",
          "nodes.covariant, algorithm.loss_options", "with loss_mode clip_cov or kl_cov"),
    rule(f"{_A}.loss_agg_mode {_A}.loss_scale_factor {_A}.use_token_level_loss", "algorithm.aggregation",
          "token-mean by default there and here; geo_mean and sapo (in siiRL and verl before 0.9 gspo too) are "
          "averaged by rows, whatever loss_agg_mode says"),
    rule(f"{_A}.entropy_coeff", "algorithm.entropy_coefficient"),
    rule(f"{_A}.use_kl_loss {_A}.kl_loss_coef", "algorithm.kl_coefficient", "with dags/grpo_kl.yaml"),
    rule(f"{_A}.kl_loss_type", "algorithm.kl", "low_var_kl is k3_clipped, kl is k1, mse is k2, abs is abs_difference; "
          "with + straight_through (of k2 k2 itself), whose value is k3 and whose gradient is the same"),
    rule(f"{_A}.tis_imp_ratio_cap", "algorithm.correction", "above 0: truncated_is with this cap"),
    rule(f"{_A}.shuffle", "", "true is how it is: mini-batches are drawn again in each step, and false is not to be "
          "had"),
    rule(f"{_A}.ulysses_sequence_parallel_size {_A}.fsdp_config.ulysses_sequence_parallel_size",
          "trainer.fsdp.sequence_parallel"),
    rule(f"{_A}.fsdp_config.fsdp_size", "trainer.fsdp.shard_size", "-1 is the default here"),
    rule(f"{_A}.fsdp_config.param_offload {_A}.fsdp_config.optimizer_offload", "trainer.park", "weights and "
          "optimizer are in the host's memory while other roles compute"),
    rule(f"{_A}.fsdp_config.offload_policy", "trainer.fsdp.offload"),
    rule(f"{_A}.fsdp_config.dtype {_A}.fsdp_config.mixed_precision.param_dtype", "model.dtype", "bfloat16 by default "
          "there; weights and optimizer are float32 in either"),
    rule(f"{_A}.profiler.enable {_A}.profiler.ranks {_A}.profiler.all_ranks", "profile.ranks"),
    always(f"{_A}.fsdp_config.model_dtype", "weights that learn are float32"),
    always(f"{_A}.fsdp_config.wrap_policy* {_A}.fsdp_config.reshard_after_forward {_A}.fsdp_config.forward_prefetch "
            f"{_A}.fsdp_config.use_orig_params {_A}.fsdp_config.mixed_precision.* {_A}.fsdp_config.strategy",
            "layers are gathered by trainer.fsdp.gather_size, and reduced in float32"),
    always(f"{_A}.use_torch_compile {_A}.entropy_* {_A}.calculate_* {_A}.use_remove_padding {_A}.use_fused_kernels "
            f"{_A}.use_prefix_grouper {_A}.fsdp_config.use_torch_compile {_A}.fsdp_config.entropy_* {_A}.load_weight",
            "log-probs and entropy run through the vocabulary in blocks, prompts that rows share once"),
    always(f"{_A}.rollout_n {_A}.recompute_old_log_prob {_A}.checkpoint.*", "old log-probs are computed, and "
            "checkpoints have all that a resume needs"),
    none(f"{_A}.ppo_micro_batch_size", "it counts rows over all devices; give ppo_micro_batch_size_per_gpu, or "
          "trainer.max_tokens_per_micro_batch here"),
    none(f"{_A}.data_loader_seed {_A}.fsdp_config.seed {_A}.fsdp_config.full_determinism", "run.seed seeds "
          "everything"),
    none(f"{_A}.profiler.* {_A}.profile*", "torch's profiler and torch_npu's are the tools: profile.* says when"),
    none(f"{_A}.qat.enable {_A}.fsdp_config.qat.enable {_A}.megatron.qat.enable", "there is no training with "
          "quantised weights", decides="model.dtype"),
    none(f"{_A}.qat* {_A}.fsdp_config.qat* {_A}.megatron.qat*", "there is no training with quantised weights"),
    always(f"{_A}.policy_loss.tau_*", "verl reads actor.tau_pos and actor.tau_neg alone"),
    none(f"{_A}.policy_loss.*", "there is no such loss", decides="algorithm.loss"),
    none(f"{_A}.fsdp_config.* {_A}.megatron.* {_A}.veomni.* {_A}.torchtitan.* {_A}.engine.* {_A}.router_replay* "
          f"{_A}.pad_to_length* {_A}.log_prob_* {_A}.ppo_infer_* {_A}.param_* {_A}.optimizer_*",
          "there is no such option of a trainer"),
    none(f"{_A}.*", "there is no such option of a trainer", decides="algorithm.loss"),
)  # fmt: skip


def optimizer(theirs: str, ours: str) -> tuple[Option, ...]:
    """Return the options of an optimizer, of the policy or of the critic."""
    lr = "1e-6 by default there" if ours == "trainer" else "1e-5 by default there"
    return (
        rule(f"{theirs}.lr", f"{ours}.lr", lr),
        rule(f"{theirs}.lr_warmup_steps {theirs}.lr_warmup_steps_ratio", f"{ours}.warmup_steps", "training steps "
              "there, optimizer steps here: x minibatches x epochs. The first step has the rate 0 there, and lr / "
              "warmup_steps here"),
        rule(f"{theirs}.warmup_style {theirs}.lr_scheduler_type {theirs}.lr_decay_style {theirs}.decay_type",
              f"{ours}.schedule", "constant by default there; with veomni cosine, with torchtitan linear"),
        rule(f"{theirs}.num_cycles", "", "0.5, half a cycle, is how it is"),
        rule(f"{theirs}.lr_decay_steps", f"{ours}.total_steps", "x minibatches x epochs"),
        rule(f"{theirs}.min_lr_ratio {theirs}.min_lr {theirs}.min_lr_factor {theirs}.lr_min",
              f"{ours}.min_lr_ratio"),
        rule(f"{theirs}.weight_decay", f"{ours}.weight_decay", "0.01 by default there, 0 here"),
        rule(f"{theirs}.betas", f"{ours}.betas"),
        rule(f"{theirs}.optimizer", f"{ours}.optimizer", "AdamW (in Megatron adam) is the default here; Muon is "
              "muon, but with megatron or adapters"),
        always(f"{theirs}.optimizer_impl {theirs}.total_training_steps {theirs}.lr_warmup_init "
                f"{theirs}.zero_indexed_step {theirs}.use_checkpoint_opt_param_scheduler", "a schedule ends with the "
                "run, and a resume goes on with it"),
        none(f"{theirs}.*", "AdamW and Muon are the optimizers, with the options of trainer"),
    )  # fmt: skip


MEGATRON = (
    rule("actor_rollout_ref.actor.megatron.tensor_model_parallel_size critic.megatron.tensor_model_parallel_size",
         "trainer.megatron.tensor_parallel, critic.megatron.tensor_parallel"),
    rule("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size critic.megatron.pipeline_model_parallel_size",
         "trainer.megatron.pipeline_parallel, critic.megatron.pipeline_parallel"),
    none(" ".join(f"{part}.megatron.{one}_offload" for part in ("actor_rollout_ref.actor", "critic")
                  for one in ("param", "grad", "optimizer")), "with Megatron weights and optimizer stay on the device: "
         "trainer.park is of torch and fsdp"),
    rule("actor_rollout_ref.actor.megatron.sequence_parallel critic.megatron.sequence_parallel",
         "trainer.megatron.sequence_parallel, critic.megatron.sequence_parallel"),
    rule("actor_rollout_ref.actor.megatron.use_distributed_optimizer critic.megatron.use_distributed_optimizer",
         "trainer.megatron.distributed_optimizer, critic.megatron.distributed_optimizer"),
    always("*.megatron.use_distributed_optimizer *.megatron.use_mbridge "
           "*.megatron.vanilla_mbridge *.megatron.use_remove_padding *.megatron.param_dtype *.megatron.pad_*",
           "rows are packed, and weights are read from the model's own folder"),
    rule("actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size "
         "critic.megatron.virtual_pipeline_model_parallel_size",
         "trainer.megatron.virtual_pipeline, critic.megatron.virtual_pipeline"),
    rule("actor_rollout_ref.actor.megatron.context_parallel_size critic.megatron.context_parallel_size",
         "trainer.megatron.context_parallel, critic.megatron.context_parallel"),
    none("*.megatron.dynamic_context_parallel", "workers share the tokens of every micro-batch, or of none"),
    rule("actor_rollout_ref.actor.megatron.expert_model_parallel_size critic.megatron.expert_model_parallel_size "
         "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size critic.megatron.expert_tensor_parallel_size",
         "trainer.megatron.expert_parallel, critic.megatron.expert_parallel",
         "their product: here each expert is whole"),
    none("*.megatron.use_dist_checkpointing *.megatron.dist_* *.megatron.distrib_*", "checkpoints are read on any "
         "number of workers as they are"),
    none("*.megatron.override_transformer_config*", "see trainer.gradient_checkpointing for recomputation, "
         "trainer.operators for what MindSpeed fuses"),
    none("*.megatron.seed", "run.seed seeds everything"),
)  # fmt: skip

CRITIC = (
    rule("critic.strategy", "critic.backend"),
    rule("critic.grad_clip critic.optim.clip_grad critic.optim.grad_clip", "critic.max_grad_norm"),
    rule("critic.ppo_max_token_len_per_gpu critic.use_dynamic_bsz critic.ppo_micro_batch_size_per_gpu",
          "critic.max_tokens_per_micro_batch"),
    rule("critic.cliprange_value", "nodes.update_critic", "0.5 in all three"),
    rule("critic.model.path", "", "the critic begins as the policy's model with a head of zeros"),
    rule("critic.model.enable_gradient_checkpointing", "critic.gradient_checkpointing"),
    rule("critic.ulysses_sequence_parallel_size", "critic.fsdp.sequence_parallel"),
    rule("critic.fsdp.param_offload critic.model.fsdp_config.param_offload critic.fsdp.optimizer_offload "
          "critic.model.fsdp_config.optimizer_offload", "critic.park"),
    always("critic.forward_* critic.rollout_n critic.shuffle critic.model.use_remove_padding critic.load_weight "
            "critic.checkpoint.* critic.enable critic.fsdp.strategy", "as for the policy"),
    rule("critic.loss_agg_mode critic.loss_scale_factor", "nodes.update_critic", "the policy's where it is not given"),
    none("critic.ppo_mini_batch_size critic.ppo_epochs", "policy and "
          "critic learn from the same mini-batches, as often (algorithm.minibatches, algorithm.epochs)"),
    none("critic.*", "there is no such option of a critic"),
)  # fmt: skip
