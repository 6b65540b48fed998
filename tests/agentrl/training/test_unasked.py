"""Why rollouts earned a reward without asking the model, as far as their spans tell."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from store_records import call_of, record_spans, start_run

from agentrl.training.unasked import note_unasked
from agentrl_tracer.schemas import AttemptState, Reward, Span
from agentrl_tracer.store import Store

GATEWAY = "http://127.0.0.1:4321"
ASKS = {"gen_ai.operation.name": "chat"}
REASONS: list[tuple[dict[str, Any] | None, str, str]] = [
    (None, "unset", ""),
    ({"gen_ai.operation.name": "execute_tool"}, "unset", ""),
    (ASKS, "unset", ": their framework answered from a cache (1)"),
    (
        ASKS | {"server.address": "127.0.0.1", "server.port": 4321},
        "unset",
        ": their framework answered from a cache (1)",
    ),
    (
        ASKS | {"server.address": "127.0.0.1", "server.port": 4321, "error.type": "APIError"},
        "error",
        ": their calls failed: APIError (1)",
    ),
    (
        ASKS | {"server.address": "api.openai.com"},
        "error",
        ": they asked api.openai.com, not OPENAI_BASE_URL (1)",
    ),
    (
        ASKS | {"server.address": "localhost", "server.port": 8000},
        "unset",
        ": they asked localhost:8000, not OPENAI_BASE_URL (1)",
    ),
]


@pytest.mark.parametrize(("attributes", "status", "reason"), REASONS)
@pytest.mark.parametrize("asked", [None, "judge"])
def test_the_note(
    store: Store, attributes: dict[str, Any] | None, status: str, reason: str, asked: str | None
) -> None:
    run_id = start_run(store)
    claim = store.claim("runner", 60.0, run_id)
    assert claim is not None
    if attributes is not None:
        ids = claim.rollout_id, claim.attempt_id
        span = Span("t", "s", None, "span", "client", 1, 2, status, attributes, [], {}, *ids)
        earned = Reward(claim.attempt_id, claim.rollout_id, "reward", 1.0, key="k")
        record_spans(store, [span], [earned])
    if asked is not None:
        call = replace(call_of(claim, "c"), model=asked, adapter=None)
        store.write_calls("boot", [call], [], 1)
        reason = ": they asked judge, which does not train (1)"
    store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    said: list[str] = []
    run: Any = SimpleNamespace(
        store=store,
        session=SimpleNamespace(gateways=SimpleNamespace(urls=[GATEWAY])),
        display=SimpleNamespace(note=said.append),
    )
    note_unasked(run, store.rollouts(run_id), 24, "rollouts")
    assert said == [f"1 of 24 rollouts earned a reward without asking the model{reason}"]
    note_unasked(run, [], 24, "rollouts")
    assert len(said) == 1
