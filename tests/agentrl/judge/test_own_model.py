"""The run's own model as its judge: the wiring, with a real sampler that enforces the JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judging import Bench, JudgeServer, judged
from running_gateway import running

from agentrl.judge import Pairwise, Relative, Rubric
from agentrl.samplers.embedded import EmbeddedSampler
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import SkipReason
from agentrl_trainer.models.loading import load_base


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    base = load_base("agentrl-tiny", device="cpu", dtype="float32")
    sampler, server = EmbeddedSampler(base), JudgeServer()
    sampler.start()
    with running(tmp_path, Renderer(base.tokenizer), {}, sampler=sampler) as gateway:
        yield Bench(gateway, server, tmp_path / "first")
    sampler.stop()
    server.close()


def judges() -> list[Any]:
    return [
        Relative("base", explain=False),
        Rubric("base", {"It names a color.": 1.0}, explain=False),
        Pairwise("base", explain=False),
    ]


def test_a_model_is_its_own_judge_and_judges_the_same_way_again(bench: Bench) -> None:
    traces = bench.group("red", "I'd rather not.", "blue")
    scores: list[Any] = []
    for name in ("first", "second"):  # runs
        bench.folder = bench.folder.with_name(name)
        bench.folder.mkdir()
        scores.append([judged(bench.connect(judge), traces) for judge in judges()])
    assert scores[0] == scores[1]
    assert all(score is not None for of_judge in scores[0] for score in of_judge)
    calls = bench.gateway.store.newest_calls(bench.gateway.run_id, None)
    assert len(calls) == 2 * (1 + 3 + 3)
    for call in calls:
        assert call.skip_reason is SkipReason.NO_ROLLOUT
        assert call.prompt_ids
        assert call.params["constrained"] == "json_schema"
    verified = bench.gateway.store.verify(bench.gateway.run_id)
    assert verified.fault is None
    assert verified.kept.skipped == {"no_rollout": len(calls)}
