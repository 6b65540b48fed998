"""The flat names that settings had before they were nested, and their new places.

Data only: errors and docs/settings.md show it.
"""

from __future__ import annotations


def _table(table: str, names: str) -> dict[str, tuple[str, ...]]:
    """Settings that kept their names, in a table now."""
    return {name: (f"{table}.{name}",) for name in names.split()}


def _options(tables: str, name: str) -> tuple[str, ...]:
    return tuple(f"algorithm.{table}.{name}" for table in tables.split())


_SCALED = "grpo rloo turn gigpo gae"

RENAMED: dict[str, tuple[str, ...]] = {
    "agent": ("agent.entrypoint",),
    **_table("agent", "tasks task python"),
    "eval_tasks": ("evaluation.tasks",),
    "eval_every": ("evaluation.every",),
    "eval_samples": ("evaluation.samples",),
    "eval_temperature": ("evaluation.temperature",),
    **_table("evaluation", "samples success_reward stop_at"),
    **_table(
        "rollouts",
        "runners runners_on concurrency rollouts_per_process timeout lease on_error on_timeout "
        "on_missing_reward max_attempts max_calls_per_rollout max_tokens_per_rollout batch_size "
        "group_size min_group max_staleness stale resample_zero_variance",
    ),
    **_table(
        "learning",
        "learning_rate schedule warmup_steps max_grad_norm rank alpha epochs max_length "
        "micro_batch_tokens gradient_checkpointing",
    ),
    **_table(
        "algorithm",
        "loss estimator length_normalization length_constant truncated off_policy skip_agents",
    ),
    "normalize_std": _options(_SCALED, "normalize_std"),
    "std_ddof": _options(f"{_SCALED} reinforce_plus_plus", "std_ddof"),
    "std_epsilon": _options(f"{_SCALED} reinforce_plus_plus", "std_epsilon"),
    "discount": _options("turn gigpo gae", "discount"),
    "step_weight": _options("gigpo", "step_weight"),
    "gae_lambda": _options("gae", "gae_lambda"),
    "value_lr": _options("gae", "value_lr"),
    "value_clip": _options("gae", "value_clip"),
    "clip_low_threshold": _options("ppo cispo gspo", "clip_low_threshold"),
    "clip_high_threshold": _options("ppo cispo gspo", "clip_high_threshold"),
    "dual_clip_threshold": _options("ppo", "dual_clip_threshold"),
    "beta": _options("dro", "beta"),
    "divergence": _options("dppo", "divergence"),
    "divergence_low": _options("dppo", "divergence_low"),
    "divergence_high": _options("dppo", "divergence_high"),
    "kl_coef": _options("kl", "coef"),
    "kl_estimator": _options("kl", "estimator"),
    "kl_gradient": _options("kl", "gradient"),
    "kl_reference": _options("kl", "reference"),
    "correction": _options("correction", "mode"),
    "correction_level": _options("correction", "level"),
    "correction_low": _options("correction", "low"),
    "correction_high": _options("correction", "high"),
    "model": ("model.name",),
    **_table(
        "model",
        "device dtype load_in_4bit trust_remote_code adapter adapter_path answered_by base_url "
        "api_key_env",
    ),
    "sampler": ("sampler.kind",),
    **_table("sampler", "temperature max_tokens"),
    "vllm_python": ("sampler.vllm.python",),
    "vllm_args": ("sampler.vllm.args",),
    "vllm_url": ("sampler.vllm.url",),
    "vllm_wait": ("sampler.vllm.wait",),
    "vllm_key_env": ("sampler.vllm.key_env",),
    "tinker_base_url": ("tinker.base_url",),
    "tinker_tokenizer": ("tinker.tokenizer",),
    "gateway": ("gateway.url",),
    "gateway_host": ("gateway.host",),
    "gateway_port": ("gateway.port",),
    **_table(
        "gateway",
        "host port operator_key accept_any_model forward_otlp max_concurrent max_queued "
        "receive_timeout receive_mib stall_timeout grace",
    ),
    "runs": ("run.folder",),
    "run": ("run.id",),
    **_table("run", "name steps seed backend store trackers keep_checkpoints logs"),
}
"""By old name, the new ones: several where a loss or an estimator has the option in its table."""
