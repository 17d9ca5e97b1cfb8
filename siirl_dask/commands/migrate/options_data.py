"""Options of the data, the rewards and the algorithm."""

from __future__ import annotations

from siirl_dask.commands.migrate.option import always, none, rule

_R = "actor_rollout_ref.rollout"

DATA = (
    rule("data.train_files", "data.url, data.sources", "several files are sources, weighted by their rows"),
    rule("data.val_files", "validation.url", "one file; of several the first"),
    rule("data.prompt_key", "data.prompt"),
    rule("data.train_batch_size", "data.batch_size", "both count prompts; 1024 by default there"),
    rule("data.max_prompt_length", "data.max_prompt_length", "512 by default there"),
    rule(f"data.max_response_length {_R}.response_length", "rollout.max_response_length", "512 by default there"),
    rule(f"{_R}.prompt_length", "data.max_prompt_length", "where data.max_prompt_length is not given"),
    rule("data.seed trainer.seed", "run.seed"),
    rule("data.image_key", "images.column", "where it is given; see images.md"),
    rule("data.apply_chat_template_kwargs*", "model.template", "arguments of the model folder's chat template"),
    rule("data.filter_overlong_prompts data.filter_overlong_prompt", "", "true is how it is: a longer one is dropped"),
    rule("data.truncation", "", "longer prompts are dropped from their step, never truncated"),
    rule("data.shuffle", "", "true is how it is: prompts come in another order in each epoch"),
    always("data.reward_fn_key", "a reward gets any column of its row"),
    always("data.return_raw_* data.return_full_prompt data.return_multi_modal_inputs", "rows are columns by name"),
    always("data.*num_workers data.filter_overlong_prompts_workers data.dataloader_num_workers", "prompts are read "
            "ahead by every worker"),
    always("data.force_on_the_fly data.streaming data.serialize_dataset data.use_shm data.*cache*", "a dataset of any "
            "size is read in place"),
    always("data.auto_repeat", "a dataset begins again after its last row"),
    always("data.tokenizer", "the tokenizer is the model folder's"),
    none("data.gen_batch_size", "each round of dynamic sampling draws as many prompts as are likely to be enough"),
    none("data.val_batch_size", "a validation is one batch, divided by rows"),
    none("data.train_max_samples", "give a dataset with these rows: siirl-dask data import",
          decides="data.sources data.url"),
    none("data.val_max_samples", "give a dataset with these rows: siirl-dask data import"),
    none("data.validation_shuffle", "a validation reads every row once, in order"),
    none("data.custom_cls.path", "make the dataset beforehand, or in data.prepare: docs/data.md",
          decides="data.sources data.url"),
    none("data.custom_cls.*", "make the dataset beforehand, or in data.prepare: docs/data.md"),
    none("data.tool_config_path data.function_tool_path", "tools are functions of an environment "
          "(environments.tools)", decides="rollout.engine"),
    none("data.video_key data.audio_key data.image_patch_size data.mm_processor_kwargs*", "prompts hold texts and "
          "images, which the model folder's own processor makes into pixels"),
    none("data.mix_strategy data.interleave_probs", "give data.sources weights by hand",
          decides="data.sources data.url"),
    none("data.dataset_type data.multi_agent data.trust_remote_code", "datasets are tables of prompts with columns"),
    none("data.*", "datasets are tables of prompts with columns", decides="data.sources data.url"),
)  # fmt: skip

REWARD = (
    rule("reward_model.overlong_buffer.enable reward_model.overlong_buffer.len "
          "reward_model.overlong_buffer.penalty_factor "
          "reward*.reward_kwargs.overlong_buffer_cfg.enable "
          "reward*.reward_kwargs.overlong_buffer_cfg.len "
          "reward*.reward_kwargs.overlong_buffer_cfg.penalty_factor "
          "custom_reward_function.overlong_buffer.*", "nodes.overlong", "the node penalise_overlong"),
    rule("reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len", "nodes.overlong", "max_length, "
          "where it is not rollout.max_response_length"),
    always("reward*.overlong_buffer*.log", "the penalty is a metric"),
    rule("reward_model.reward_manager reward.reward_manager.name", "rewards.function", "naive and dapo choose by the "
          "data's source; the function is chosen by the dataset's name here"),
    rule("custom_reward_function.path custom_reward_function.name custom_reward_function.reward_kwargs.* "
          "reward.custom_reward_function.path reward.custom_reward_function.name "
          "reward.custom_reward_function.reward_kwargs.*", "rewards.function, rewards.options", "from_verl calls it as "
          "verl does, a row at a time"),
    none("custom_reward_function.* reward.custom_reward_function.*", "there is no such option of a reward"),
    none("reward_model.sandbox_fusion.url reward.sandbox_fusion.url sandbox_fusion.url", "code runs in a sandbox of "
          "the worker's: siirl_dask.rewards:code_execution", decides="rewards.function"),
    none("reward_model.sandbox_fusion* reward.sandbox_fusion* sandbox_fusion.*", "code runs in a sandbox of the "
          "worker's: siirl_dask.rewards:code_execution"),
    none("reward_model.enable reward.reward_model.enable", "a reward model is a role of its own: docs/rewards.md, A "
          "reward model", decides="rewards.function"),
    none("reward_model.model.* reward.reward_model.*", "a reward model is a role of its own: docs/rewards.md, A "
          "reward model"),
    none("reward_model.reward_kwargs.* reward.reward_kwargs.*", "there is no such option of a reward",
          decides="rewards.options rewards.function"),
    always("reward.num_workers reward_model.num_workers reward_model.launch_reward_fn_async", "a reward begins while "
            "others are generated, where it is async or in rewards.processes"),
    none("reward_model.* reward.*", "there is no such option of a reward"),
)  # fmt: skip

ALGORITHM = (
    rule("algorithm.adv_estimator", "algorithm.advantage", "with the DAG that it needs; gae by default there, grpo "
          "here"),
    rule("algorithm.gamma algorithm.lam", "algorithm.advantage_options", "discount and gae_lambda"),
    rule("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage", "false is dr_grpo; true divides by the group's "
          "std + 1e-6, as grpo does; grpo_vectorized and gdpo divide by it, whatever this says"),
    rule("algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights", "nodes.advantage, algorithm.advantage_options",
          "parts of a reward that is a dict, with adv_estimator gdpo; sums are standardised over "
          "responses here, over tokens there"),
    rule("algorithm.use_kl_in_reward algorithm.kl_ctrl.* algorithm.kl_penalty", "roles.kl, nodes.kl", "a "
          "KLController and the node penalise_kl; it adapts to the mean over tokens, there to the mean over rows of "
          "each row's mean"),
    rule("algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches", "nodes.rollout",
          "dags/dapo.yaml, with rounds"),
    rule("algorithm.filter_groups.metric", "", "groups whose rewards are all equal are replaced, by reward"),
    rule("algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_is_threshold "
          "algorithm.rollout_correction.rollout_rs "
          "algorithm.rollout_correction.rollout_rs_threshold",
          "algorithm.correction, algorithm.correction_options", "of weights one bound is truncated_is and two, as in "
          "0.5_5.0, masked_is; k1 is reject_tokens or reject_sequences with the inverse bounds, "
          "since there the engine's probability is over the policy's; k2 and k3 are "
          "reject_divergent; several are combined. What is rejected still counts in the loss's "
          "denominators and in KL and entropy here"),
    rule("algorithm.rollout_correction.bypass_mode", "algorithm.old_logprobs", "true is rollout_logprobs, and no "
          "correction"),
    rule("algorithm.rollout_correction.loss_type", "algorithm.loss", "reinforce is policy_gradient, and cispo with "
          "weights of tokens; with bypass_mode alone"),
    none("algorithm.rollout_correction.rollout_is_batch_normalize", "weights are not divided by their mean over the "
          "batch"),
    always("algorithm.algorithm_name algorithm.workflow_type", "the DAG follows from the estimator and the filters"),
    none("algorithm.rollout_correction.*", "see docs/algorithms.md, Corrections for the sampler",
          decides="algorithm.correction"),
    none("algorithm.use_pf_ppo", "rows are not sampled again by their rewards", decides="algorithm.advantage"),
    none("algorithm.pf_ppo*", "rows are not sampled again by their rewards"),
    none("algorithm.weight_factor_in_cpgd", "advantages with cpgd are those of algorithm.advantage"),
    none("algorithm.share_reward_in_agent", "see docs/agents.md"),
    none("algorithm.filter_groups.* algorithm.embodied_sampling*", "there is no such option of an algorithm"),
    none("algorithm.*", "there is no such option of an algorithm", decides="algorithm.advantage"),
)  # fmt: skip
