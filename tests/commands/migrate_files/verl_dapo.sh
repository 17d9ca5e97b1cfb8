set -euxo pipefail
exp_name='dapo-small'
offload=True
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
NNODES=${NNODES:-2}
MODEL_PATH=${MODEL_PATH:-"${HOME}/models/Qwen2.5-32B"}
sizes=(
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}  # tokens
)
sizes+=( data.gen_batch_size=$((512 * 3)) data.train_batch_size=512 )
ray job submit --no-wait --working-dir "${PWD}" \
    -- python3 -m verl.trainer.main_ppo "${sizes[@]}" \
    data.train_files="['/data/dapo-math-17k.parquet', '/data/more.parquet']" \
    data.val_files=/data/aime-2024.parquet \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    +actor_rollout_ref.model.override_config.attention_dropout=0. \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    actor_rollout_ref.rollout.top_k="-1" \
    algorithm.adv_estimator=grpo \
    algorithm.filter_groups.enable=True \
    algorithm.filter_groups.max_num_gen_batches=7 \
    algorithm.filter_groups.metric=acc \
    reward_model.reward_manager=dapo \
    reward_model.overlong_buffer.enable=True \
    reward_model.overlong_buffer.len=4096 \
    reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.logger='["console","wandb"]' \
    trainer.experiment_name="${exp_name}" \
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES}" \
    trainer.total_epochs=1 trainer.save_freq=5 $@ 2>&1 | tee run.log
