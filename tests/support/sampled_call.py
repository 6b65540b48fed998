"""A call to the policy as the gateway records it."""

from __future__ import annotations

from agentrl_tracer.schemas import Call, CallState


def call(response_ids: list[int]) -> Call:
    return Call(
        id=f"c{response_ids[0]}", response_id="r", choice=0, run_id="run", rollout_id=None,
        attempt_id=None, seq=0, agent=None, model="policy", adapter="policy", adapter_version=0,
        state=CallState.COMPLETED, prompt_ids=[1], response_ids=response_ids,
        response_logprobs=[-0.5] * len(response_ids), finish_reason="stop", params={},
        request=None, response=None, error=None, trace_id=None, span_id=None, started_at=0.0,
        ended_at=1.0,
    )  # fmt: skip
