"""The table of TRL's options: names and defaults are those of TRL 1.16 (``GRPOConfig``,
``GRPOTrainer``, ``ModelConfig`` and the arguments of ``trl grpo``).
"""

from __future__ import annotations

from siirl_dask.commands.migrate.option import always, none, rule

TRL = (
    rule("model model_name_or_path", "model.path", "a name of the hub, org/name, becomes hf://org/name"),
    rule("train_dataset dataset_name", "data.url", "a folder or a file; one of the hub is imported first"),
    rule("eval_dataset", "validation.url"),
    rule("reward_funcs reward_columns", "rewards.function, rewards.options", "from_trl calls them as TRL does, with a "
         "row at a time"),
    rule("reward_weights", "rewards.options", "weights"),
    rule("num_processes", "cluster.workers", "of the launcher; 1 where it is not given"),
    rule("per_device_train_batch_size generation_batch_size num_generations", "data.batch_size, rollout.n", "prompts "
         "of a step: completions generated at a time / num_generations"),
    rule("gradient_accumulation_steps steps_per_generation", "algorithm.minibatches", "steps_per_generation / "
         "gradient_accumulation_steps"),
    rule("num_iterations", "algorithm.epochs"),
    rule("shuffle_dataset", "", "true is how it is: prompts come in another order in each epoch"),
    rule("max_completion_length", "rollout.max_response_length", "512 by default there"),
    rule("max_prompt_length vllm_max_model_length", "data.max_prompt_length", "TRL 1.16 has no limit of prompts"),
    rule("temperature", "rollout.temperature"),
    rule("top_p", "rollout.top_p"),
    rule("top_k", "rollout.top_k"),
    rule("min_p", "rollout.min_p"),
    rule("chat_template_kwargs", "model.template"),
    rule("learning_rate", "trainer.lr", "1e-6 by default there"),
    rule("lr_scheduler_type", "trainer.schedule", "linear by default there, constant here"),
    rule("warmup_steps warmup_ratio", "trainer.warmup_steps", "optimizer steps in both; below 1 a part of all; the "
         "first has the rate 0 there, and lr / warmup_steps here"),
    rule("weight_decay", "trainer.weight_decay"),
    rule("adam_beta1 adam_beta2", "trainer.betas"),
    rule("adam_epsilon", "trainer.eps"),
    rule("max_grad_norm", "trainer.max_grad_norm"),
    rule("max_steps num_train_epochs", "run.steps", "max_steps counts optimizer steps, minibatches x epochs of them in "
         "a step here; epochs follow from the rows"),
    rule("loss_type", "algorithm.loss, algorithm.aggregation", "dapo by default there; benchmarks/trl.md has how far "
         "apart each is"),
    rule("importance_sampling_level", "algorithm.loss", "sequence is gspo, of grpo, bnpo, dapo, dr_grpo and luspo"),
    rule("epsilon epsilon_high delta sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos "
         "vespo_k_neg vespo_lambda_neg", "algorithm.loss_options", "delta is dual_clip; cispo's clip_high is "
         "epsilon_high - 1, for TRL bounds the weight by epsilon_high itself; k of vespo are powers, its lambda "
         "decays"),
    rule("off_policy_mask_threshold", "algorithm.correction, algorithm.correction_options", "mask_off_policy"),
    rule("top_entropy_quantile", "nodes.forks, algorithm.correction", "choose_high_entropy and keep_high_entropy, "
         "by mini-batches and by entropies before the update; there by micro-batches and of the pass that learns"),
    rule("scale_rewards", "algorithm.advantage", "group is grpo with TRL's epsilon of 1e-4, batch the same with scale, "
         "none dr_grpo"),
    rule("multi_objective_aggregation", "algorithm.advantage, nodes.advantage", "normalize_then_sum is gdpo; a "
         "function that gives None ends the run here"),
    rule("beta use_bias_correction_kl", "algorithm.kl_coefficient, algorithm.kl_bias_correction", "with "
         "dags/grpo_kl.yaml; the correction is on by default there"),
    rule("entropy_coef", "algorithm.entropy_coefficient", "a mean over tokens there, and averaged as the loss is here"),
    rule("mask_truncated_completions", "nodes.masked", "the node mask_truncated"),
    rule("sync_ref_model ref_model_sync_steps ref_model_mixup_alpha", "trainer.ema_every, trainer.ema_decay", "with "
         "dags/grpo_average.yaml; with an alpha of 1 after each step the reference is the policy, and needs no "
         "average"),
    rule("use_vllm", "rollout.engine", "false is transformers"),
    rule("vllm_gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", "0.3 by default there"),
    rule("vllm_tensor_parallel_size", "rollout.tensor_parallel_size"),
    rule("vllm_enable_sleep_mode", "rollout.vllm.sleep_level"),
    rule("vllm_mode", "", "colocate is how it is; with server its engines are workers here: cluster.placement"),
    rule("vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
         "vllm_importance_sampling_clip_min vllm_importance_sampling_cap", "algorithm.correction, "
         "algorithm.correction_options", "with use_vllm; *_truncate is truncated_is and *_mask masked_is; a clip_max "
         "of null is no bound; for vespo algorithm.old_logprobs is rollout_logprobs"),
    rule("bf16 fp16", "model.dtype", "bfloat16 by default there"),
    rule("cast_lm_head_to_fp32", "model.float32_head", "in the engine as well"),
    rule("optim", "trainer.optimizer", "every AdamW there is adamw; another optimizer than that and muon has no "
         "counterpart"),
    rule("gradient_checkpointing", "trainer.gradient_checkpointing", "true by default there"),
    rule("use_liger_kernel", "trainer.liger"),
    rule("model_init_kwargs.* dtype", "", "weights learn in float32, and bfloat16 is for computing"),
    rule("use_peft lora_r", "trainer.lora.rank"),
    rule("lora_alpha use_rslora lora_use_rslora", "trainer.lora.alpha", "with rslora alpha x sqrt(rank), for the "
         "adapters are scaled by alpha / rank here"),
    rule("lora_dropout", "", "0, none, is how it is; 0.05 by default in trl grpo"),
    rule("lora_bias", "", "none is how it is"),
    rule("repetition_penalty", "", "1, none, is how it is"),
    rule("model_revision", "model.path", "of a model of the hub: hf://org/name@revision"),
    rule("lora_target_modules", "trainer.lora.targets", "peft chooses by the kind of model where none are given, which "
         "is asked for"),
    rule("seed", "run.seed", "42 by default there"),
    rule("output_dir", "run.url"),
    rule("run_name", "run.name"),
    rule("report_to", "observe.backends"),
    rule("save_strategy save_steps", "checkpoint.every", "500 optimizer steps by default there"),
    rule("save_total_limit", "checkpoint.keep"),
    rule("eval_strategy eval_steps", "validation.every"),
    always("logging_* log_* num_completions_to_print disable_tqdm", "every step is logged, and every sample is a row"),
    always("remove_unused_columns dataloader_* pad_to_multiple_of pad_token auto_find_batch_size group_by_length",
           "rows are packed, and prompts are read ahead by every worker"),
    always("ddp_* deepspeed fsdp* accelerator_config parallelism_config ds3_gather_for_generation local_rank",
           "trainer.backend=fsdp shards a model over the workers of its role"),
    always("disable_dropout gradient_checkpointing_kwargs torch_empty_cache_steps tf32 attn_implementation "
           "lora_task_type lora_inference_mode lora_peft_type trackio_* project do_train "
           "do_eval overwrite_output_dir config_file main_process_port",
           "it changes nothing that a run computes, or is so anyway"),
    always("vllm_server_* vllm_group_port vllm_model_impl use_transformers_* cache_implementation "
           "transformers_continuous_batching_config", "engines are roles of the run's own workers"),
    always("processing_class dataset_train_split dataset_test_split dataset_config dataset_streaming",
           "the tokenizer is the model folder's, and a dataset is a table"),
    none("push_to_hub hub_*", "siirl-dask export writes a Hugging Face folder: push that"),
    none("reward_model reward_model_name_or_path", "a reward model is a role of its own: docs/rewards.md, A reward "
         "model", decides="rewards.options"),
    none("reward_processing_classes", "a reward model is a role of its own: docs/rewards.md, A reward model"),
    none("callbacks", "a run has no callbacks: see docs/monitoring.md, and docs/dags.md for nodes of your own"),
    none("tools environment_factory rollout_func", "see docs/environments.md and docs/agents.md",
         decides="rollout.engine"),
    none("max_tool_calling_iterations", "see docs/environments.md and docs/agents.md"),
    none("use_adaptive_entropy", "the coefficient of the entropy is constant",
         decides="algorithm.entropy_coefficient"),
    none("entropy_coef_* entropy_target", "the coefficient of the entropy is constant"),
    none("router_aux_loss_coef", "a mixture's experts are balanced by no loss of their own"),
    none("generation_kwargs vllm_structured_outputs_regex", "sampling is that of the policy, so that log-probs are "
         "its own", decides="rollout.temperature"),
    none("model_init_kwargs quantization_config load_in_* bnb_* use_bnb_nested_quant trust_remote_code",
         "weights are those of the folder, and its code is never run"),
    none("lora_* use_dora peft_config", "adapters are A B x alpha / rank on the layers of trainer.lora.targets",
         decides="trainer.lora.rank"),
    none("lr_scheduler_kwargs", "a schedule has trainer.min_lr_ratio and trainer.total_steps",
         decides="trainer.schedule"),
    none("optim_args optim_target_modules optimizers optimizer_cls_and_kwargs", "AdamW and Muon are the optimizers, "
         "with the options of trainer", decides="trainer.lr"),
    none("compute_loss_func neftune_noise_alpha label_smoothing_factor", "there is no such option of a run",
         decides="algorithm.loss"),
    none("resume_from_checkpoint", "a run resumes by itself"),
    none("num_generations_eval per_device_eval_batch_size", "see validation.n"),
    none("datasets", "give data.sources by hand", decides="data.url"),
    none("preprocess_logits_for_metrics", "there is no such option of a run"),
)  # fmt: skip


def trl_markdown() -> str:
    """Return the table as docs/migrating.md shows it."""
    rows = []
    for option in TRL:
        names = ", ".join(f"`{name}`" for name in option.names)
        rows.append(f"| {names} | {option.counterpart()} | {option.note} |")
    head = ["| TRL | here | how, or why not |", "|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"
