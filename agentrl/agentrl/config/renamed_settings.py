"""The flat names that settings had before they were nested, and their new places. Data only."""

from __future__ import annotations

_SAME_NAME = {
    "agent": "tasks task python",
    "evaluation": "samples success_reward stop_at",
    "rollouts": "runners runners_on concurrency rollouts_per_process timeout lease on_error "
    "on_timeout on_missing_reward max_attempts max_calls_per_rollout max_tokens_per_rollout "
    "batch_size group_size min_group max_staleness stale resample_zero_variance",
    "learning": "learning_rate schedule warmup_steps max_grad_norm rank alpha epochs max_length "
    "micro_batch_tokens gradient_checkpointing",
    "algorithm": "loss estimator length_normalization length_constant truncated off_policy "
    "skip_agents",
    "algorithm.gae": "gae_lambda value_lr value_clip",
    "algorithm.gigpo": "step_weight",
    "algorithm.dppo": "divergence divergence_low divergence_high",
    "model": "device dtype load_in_4bit trust_remote_code adapter adapter_path answered_by "
    "base_url api_key_env",
    "sampler": "temperature max_tokens",
    "gateway": "host port operator_key accept_any_model forward_otlp max_concurrent max_queued "
    "receive_timeout receive_mib stall_timeout grace",
    "run": "name steps seed backend store trackers keep_checkpoints logs",
}
_SEVERAL_PLACES = {
    "normalize_std": "grpo rloo turn gigpo gae",
    "std_ddof": "grpo rloo turn gigpo gae reinforce_plus_plus",
    "std_epsilon": "grpo rloo turn gigpo gae reinforce_plus_plus",
    "discount": "turn gigpo gae",
    "clip_low_threshold": "ppo cispo gspo",
    "clip_high_threshold": "ppo cispo gspo",
    "dual_clip_threshold": "ppo",
    "beta": "dro",
}
_CHANGED = str.split("""
    agent agent.entrypoint  eval_tasks evaluation.tasks  eval_every evaluation.every
    eval_samples evaluation.samples  eval_temperature evaluation.temperature
    kl_coef algorithm.kl.coef  kl_estimator algorithm.kl.estimator
    kl_gradient algorithm.kl.gradient  kl_reference algorithm.kl.reference
    correction algorithm.correction.mode  correction_level algorithm.correction.level
    correction_low algorithm.correction.low  correction_high algorithm.correction.high
    model model.name  sampler sampler.kind  vllm_python sampler.vllm.python
    vllm_args sampler.vllm.args  vllm_url sampler.vllm.url  vllm_wait sampler.vllm.wait
    vllm_key_env sampler.vllm.key_env  tinker_base_url tinker.base_url
    tinker_tokenizer tinker.tokenizer  gateway gateway.url  gateway_host gateway.host
    gateway_port gateway.port  runs run.folder  run run.id
""")

RENAMED: dict[str, tuple[str, ...]] = {
    **{name: (f"{table}.{name}",) for table, names in _SAME_NAME.items() for name in names.split()},
    **{
        name: tuple(f"algorithm.{table}.{name}" for table in tables.split())
        for name, tables in _SEVERAL_PLACES.items()
    },
    **{old: (new,) for old, new in zip(_CHANGED[::2], _CHANGED[1::2], strict=True)},
}
"""By old name, the new ones: several where several losses or estimators have the option."""
