"""Find what is wrong with the answers and rewards of rollouts, and say what helps.

In one place, because ``agentrl check`` prints it before a training and ``agentrl train`` after its
steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl_tracer.schemas import Call, CallState

if TYPE_CHECKING:
    from agentrl_proxy.rendering.renderer import Renderer

ThoughtMarks = tuple[list[int], list[int]]

CUT_OFF_FROM = 0.1
"""A few long answers are what sampling brings. An answer that is cut off has rarely said its
result, so from here on a tenth of the rollouts are judged by their length."""
EQUAL_FROM = 0.5
"""From here on more of a step's rollouts are thrown away than learned from."""
THINKING_FROM = 0.5
"""Most answers: then reasoning decides how long rollouts take."""
_AGAIN_AFTER = 25  # steps

MORE_SIGNAL = (
    "reward parts of the result, choose easier tasks, sample more per task (--group-size) or at a "
    "higher temperature, or train on examples of good answers first (`agentrl sft`)"
)

WHERE_THE_MODEL_IS = "it is at OPENAI_BASE_URL, named AGENTRL_MODEL"


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact, and what to do where it is a problem."""

    fact: str
    fix: str = ""
    """Empty: nothing is wrong."""
    stops: bool = False
    """Nothing can be learned."""

    def __str__(self) -> str:
        return f"{self.fact}: {self.fix}" if self.fix else self.fact


def answered(calls: Iterable[Call]) -> list[Call]:
    """Return the calls that a model with known tokens has answered."""
    return [call for call in calls if call.state is CallState.COMPLETED and call.response_ids]


def cut_off(calls: Sequence[Call], max_tokens: int) -> Finding:
    """Count the answers that ended at their token limit; ``max_tokens`` is the setting."""
    limits = [call.params.get("max_tokens") for call in calls if call.finish_reason == "length"]
    if not limits:
        return Finding(f"no answer was cut off at max_tokens {max_tokens}")
    at = f"max_tokens {limits[0]}" if len(set(limits)) == 1 else "limits of their requests"
    raised = "--max-tokens" if at.endswith(f" {max_tokens}") else "what the agent requests"
    fix = f"raise {raised}; an answer without its end seldom earns what it deserves"
    fact = f"{len(limits)} of {len(calls)} answers were cut off at {at}"
    return Finding(fact, fix if len(limits) >= CUT_OFF_FROM * len(calls) else "")


def comparable(reward: float) -> float:
    """Round a reward as far as training tells rewards apart: sums differ as 0.1 + 0.2 and 0.3."""
    return float(f"{reward:.9g}")


def equal_rewards(groups: Sequence[Sequence[float]], success: float) -> Finding:
    """Count the groups of rollouts that all earned the same; from ``success`` on they succeeded."""
    groups = [[*map(comparable, rewards)] for rewards in groups]
    same = Counter(rewards[0] for rewards in groups if len(set(rewards)) == 1)
    if not same:
        return Finding(f"all {len(groups)} groups had different rewards")
    values = ", ".join(f"{count} of them {value:g}" for value, count in same.most_common(2))
    fact = f"{same.total()} of {len(groups)} groups had equal rewards ({values})"
    solved = sum(count for value, count in same.items() if value >= success)
    helps = "choose harder tasks, or end here" if 2 * solved > same.total() else MORE_SIGNAL
    much = same.total() >= EQUAL_FROM * len(groups)
    return Finding(fact, f"they teach nothing; {helps}" if much else "")


def thought_marks(renderer: Renderer) -> ThoughtMarks | None:
    """Return the tokens that open and that close a thought; None where the vocabulary has none of
    its own for it: the model does not think."""
    marks = [renderer.encode(mark) for mark in renderer.reasoning_marks or ()]
    own = renderer.tokenizer.added_tokens_decoder
    return (marks[0], marks[1]) if marks and all(ids[0] in own for ids in marks) else None


def thinking(calls: Sequence[Call], marks: ThoughtMarks, *, wanted: bool | None) -> Finding:
    """Say how much of the answers is reasoning; what was asked for (``wanted``) is no problem."""
    thoughts = [count for call in calls if (count := _thought(call, *marks)) > 0]
    if not thoughts:
        return Finding("no answer contains reasoning")
    part = sum(thoughts) / sum(len(call.response_ids) for call in calls)
    fact = (
        f"thinking is on: {len(thoughts)} of {len(calls)} answers contain reasoning, {part:.0%} of "
        "all sampled tokens"
    )
    fix = (
        "give it room (--max-tokens), or turn it off (--sampler.thinking false) where the chat "
        "template has a switch; --sampler.thinking true says that you want it so"
    )
    much = len(thoughts) >= THINKING_FROM * len(calls)
    return Finding(fact, fix if much and not wanted else "")


def _thought(call: Call, opens: list[int], closes: list[int]) -> int:
    """Count the tokens of an answer's first thought, which the prompt may open."""
    prompt, answer = [*call.prompt_ids[-8:]], [*call.response_ids]
    opened = max(_places(prompt, opens), default=-1) > max(_places(prompt, closes), default=-1)
    begin = 0 if opened else next(_places(answer, opens), None)
    if begin is None:
        return 0
    return next(_places(answer[begin:], closes), len(answer) - begin)


def _places(ids: list[int], mark: list[int]) -> Iterator[int]:
    return (i for i in range(len(ids)) if ids[i : i + len(mark)] == mark)


@dataclass
class StepNotes:
    """Tells the problems of steps: each when it is first there, and again after many steps."""

    note: Callable[[str], object]
    _next: dict[str, int] = field(default_factory=dict[str, int])

    def take(self, step: int, found: Mapping[str, Finding]) -> None:
        """Tell what is due of a step's findings, by kind."""
        for kind, one in found.items():
            if one.fix and step >= self._next.get(kind, step):
                self._next[kind] = step + _AGAIN_AFTER
                self.note(f"step {step}: {one}")
