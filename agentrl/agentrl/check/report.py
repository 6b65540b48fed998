"""Say, line by line, what a training would meet, from the rollouts of a check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from statistics import fmean

from agentrl.check.agents_memory import AgentsMemory
from agentrl.check.resources import memory_findings, seconds_per_token, time_finding
from agentrl.check.signal import how_to_reward, signal_finding, success_finding
from agentrl.config.commands import CheckConfig
from agentrl.findings import Finding, answered, cut_off, thinking, thought_marks
from agentrl.training.metrics import count_failures
from agentrl.training.queue.rollout_queue import seconds_of_running
from agentrl_proxy.errors import ApiError
from agentrl_proxy.rendering.continuity import Branch
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.structured_output import reads_calls
from agentrl_proxy.rendering.templates import THINKING_SWITCHES
from agentrl_tracer.schemas import Call, Rollout
from agentrl_trainer.data.packing import count_tokens
from agentrl_trainer.data.skip_reasons import SkipRules
from agentrl_trainer.data.training_row import TrainingRow, to_training_row
from agentrl_trainer.data.trajectories import build_trajectories
from agentrl_trainer.models.loading import load_facts

_BEGINS = (Branch.NO_ROLLOUT, Branch.FIRST_CALL)
_TOOL = {"type": "function", "function": {"name": "look_up_color", "parameters": {}}}


def findings(
    config: CheckConfig,
    steps: int,
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    rewards: Mapping[str, float | None],
    agents: AgentsMemory,
) -> tuple[dict[str, list[Finding]], Finding]:
    """Return the findings by line of the report, and the verdict.

    Args:
        steps: of the training.
        calls: of the rollouts, with their requests.
        rewards: by rollout; None: it has none.
        agents: of the runners while they ran the rollouts.
    """
    source = config.tinker.tokenizer or config.model.name
    known = load_facts(source, **config.model.of_tokenizer)
    renderer, how = Renderer(known.tokenizer), config.rollouts
    marks, adapter = thought_marks(renderer), next(iter(config.trained))
    mine, count = [call for call in answered(calls) if call.prompt_ids], len(rollouts)
    by_task: dict[str, list[float | None]] = {}
    for rollout in rollouts:
        by_task.setdefault(rollout.task_id, []).append(rewards[rollout.id])
    unpaid = sum(r.winner is not None and rewards[r.id] is None for r in rollouts)
    found = {
        "success": [
            success_finding([*by_task.values()], config.evaluation.success_reward),
            *(
                [Finding(f"{unpaid} of {count} rollouts have no reward", how_to_reward(config))]
                if 0 < unpaid < count  # the verdict says it of all
                else ()
            ),
            *(
                Finding(f"{failed} rollouts failed: {why}", "look into their logs")
                for why, failed in count_failures(rollouts).items()
            ),
        ],
        "template": [*_template(renderer, calls, thinks=marks is not None)],
    }
    if not mine:
        asked = ", ".join(sorted({call.model for call in calls})) or "no model"
        fix = "the model in training is at OPENAI_BASE_URL, named AGENTRL_MODEL"
        return found, Finding(f"nothing would train: the agent asked {asked}", fix, stops=True)
    length = config.learning.max_length or known.context_length
    found["calls"] = [*_calls(mine, count)]
    found["tokens"] = [*_tokens(mine, count, length), cut_off(mine, config.sampler.max_tokens)]
    if marks is not None:
        found["tokens"].append(thinking(mine, marks, wanted=config.sampler.thinking))
    verdict, teaches = signal_finding([*by_task.values()], config)
    rows, update = _rows(mine, adapter, length), None
    step = how.batch_size * how.group_size / count
    if rows and config.run.backend == "local":
        at_once = min(how.runners * how.concurrency, count)
        needed = partial(agents.of, measured=at_once)
        found["memory"] = [*memory_findings(config, rows, needed)]
        if found["memory"][0].stops:
            verdict = found["memory"][0]
        else:
            tokens = count_tokens(rows).unique * step
            update = seconds_per_token(config, rows) * tokens
    found["time"] = [time_finding(steps, seconds_of_running(rollouts) * step, update, teaches)]
    return found, verdict


def _template(renderer: Renderer, calls: Sequence[Call], *, thinks: bool) -> Iterator[Finding]:
    """Try out what the chat template writes."""
    sent = sum(bool(call.request and call.request.get("tools")) for call in calls)
    try:
        knows = "look_up_color" in renderer.text([{"role": "user", "content": "x"}], [_TOOL])
    except ApiError:  # the template refuses them
        knows = False
    said = f"{'knows' if knows else 'does not know'} tools, which {sent or 'no'} calls sent"
    reads = knows and reads_calls(renderer)
    if knows and not reads:
        said += "; its tool calls are not read, and stay text"
    fix = "choose a model whose tool calls are read, or describe tools in the prompt"
    yield Finding(said, fix if sent and not reads else "")
    switch = "a switch" if renderer.switches.intersection(THINKING_SWITCHES) else "no switch"
    yield Finding(f"knows thinking, has {switch} for it" if thinks else "does not know thinking")


def _calls(calls: Sequence[Call], rollouts: int) -> Iterator[Finding]:
    """Say how many calls a rollout makes, and how they continue."""
    counts = [*Counter(call.rollout_id for call in calls).values()]
    few, many = min(counts) if len(counts) == rollouts else 0, max(counts)
    spread = f" ({few} to {many})" if few < many else ""
    yield Finding(f"{len(calls) / rollouts:.3g} a rollout{spread}")
    began = Counter(call.params.get("branched") for call in calls if call.choice == 0)
    branched = {why: n for why, n in began.items() if why is not None and why not in _BEGINS}
    if later := began[None] + sum(branched.values()):
        exactly = f"{began[None]} of {later} later calls continue the one before, token for token"
        why = ", ".join(f"{why.replace('_', ' ')} {n}" for why, n in branched.items())
        rest = "; the others train as rows of their own, which takes longer"
        yield Finding(exactly + (f"{rest} ({why})" if branched else ""))


def _tokens(calls: Sequence[Call], rollouts: int, most: int) -> Iterator[Finding]:
    prompt = fmean(len(call.prompt_ids) for call in calls)
    sampled = sum(len(call.response_ids) for call in calls)
    whole = [len(call.prompt_ids) + len(call.response_ids) for call in calls]
    yield Finding(
        f"a prompt has {prompt:.0f}, an answer {sampled / len(calls):.0f}; a rollout samples "
        f"{sampled / rollouts:.0f}; the longest trajectory has {max(whole)} of at most {most}",
        "raise learning.max_length: longer ones do not train" if max(whole) > most else "",
    )


def _rows(calls: Sequence[Call], adapter: str, max_length: int) -> list[TrainingRow]:
    """Cut each attempt's calls into trajectories, as if ``adapter`` had answered them."""
    whole = [replace(call, adapter=adapter, adapter_version=0, skip_reason=None) for call in calls]
    return [
        to_training_row(path, dict.fromkeys(path.call_ids, 1.0))
        for _, mine in groupby(whole, key=lambda call: call.attempt_id)
        for path in build_trajectories([*mine], SkipRules(max_length=max_length)).trajectories
    ]
