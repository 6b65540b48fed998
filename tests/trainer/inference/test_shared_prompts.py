"""Rollouts that begin with the same long prompt, as coding agents do."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from small_models import Asked

from agentrl_trainer.inference import SampleParams

SYSTEM, TASK, ANSWER, CALLS = 150, 10, 8, 3


def test_shared_prompts_are_computed_once(engine) -> None:
    """Two tasks' groups of three rollouts, whose calls follow each other; then one rollout more."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(256) for _ in range(count)]

    system, tasks = ids(SYSTEM), [ids(TASK), ids(TASK)]
    results = {(rollout, call): ids(TASK) for rollout in range(7) for call in range(CALLS)}

    def rollout(number: int) -> None:
        tokens = [*system, *tasks[number % 2]]
        for call in range(CALLS):
            params = SampleParams(max_tokens=ANSWER, seed=10 * number + call)
            answer = Asked(engine, [*tokens], params).one()
            tokens += [token.token_id for token in answer.tokens]
            tokens += results[number, call]

    with ThreadPoolExecutor(6) as agents:
        list(agents.map(rollout, range(6)))
    before = engine.stats()
    own = CALLS * ANSWER + (CALLS - 1) * TASK
    assert before.generated_tokens == 6 * CALLS * ANSWER
    unique = SYSTEM + 2 * TASK + 6 * own
    # A call computes the last token before it again, which was sampled and never fed.
    assert before.prefill_tokens + before.generated_tokens <= 1.1 * unique
    rollout(6)  # what ended rollouts computed is kept
    assert engine.stats().prefill_tokens - before.prefill_tokens <= CALLS * (TASK + 1)
