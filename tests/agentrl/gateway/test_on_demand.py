"""Replays: a real run's calls asked again of its own versions, through a gateway on demand."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient
from training_run import Run

from agentrl.config.errors import ConfigError
from agentrl.gateway.on_demand import AGENT, Replay, Replayer, Sampling, targets
from agentrl.history.replays import replays_of
from agentrl.history.vocabulary import Vocabularies
from agentrl.ui.app import create_app
from agentrl_tracer.schemas import Call, CallState, SkipReason
from agentrl_tracer.store import Store

pytestmark = pytest.mark.timeout(300)
GREEDY = Sampling(temperature=0.0, max_tokens=32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps whose learning rate is so high that the versions answer differently."""
    return Run(
        tmp_path_factory.mktemp("replayed"), "mixed", steps=2, batch_size=2, group_size=3,
        learning_rate=3e-2,
    ).finish()  # fmt: skip


@pytest.fixture(scope="module")
def call(run: Run) -> Call:
    return next(call for call in run.calls() if call.trained_step == 1)


@pytest.fixture(scope="module")
def replayer() -> Iterator[Replayer]:
    replayer = Replayer()
    yield replayer
    replayer.close()


def wait(replay: Replay | None) -> None:
    assert replay is not None
    while not replay.is_over:
        time.sleep(0.05)
    assert replay.state == "done", replay.error


def test_a_call_is_asked_again_of_each_version_and_the_books_still_balance(
    run: Run, call: Call, replayer: Replayer
) -> None:
    before = run.accounting()
    known = targets(run.folder)
    assert list(known) == ["policy@2", "policy@1", "policy@0", "agentrl-tiny"]
    for name in known:
        wait(replayer.start(run.folder, call, known[name], GREEDY))
    tiny, first, second, third = replays_of(run.folder, call.id)
    made = [tiny, first, second, third]
    assert [(one.adapter, one.adapter_version) for one in made] == [
        (None, None), ("policy", 0), ("policy", 1), ("policy", 2),
    ]  # fmt: skip
    for one in made:
        assert one.prompt_ids == call.prompt_ids
        assert one.agent == AGENT
        assert one.state is CallState.COMPLETED
        assert one.rollout_id is None
        assert one.skip_reason is SkipReason.NO_ROLLOUT
    assert tiny.response_ids == first.response_ids  # a new adapter is the base model
    assert first.response_ids != third.response_ids
    assert run.accounting() == before  # which must balance
    assert call.id in {one.id for one in run.calls()}
    with closing(Store(str(run.folder.store))) as store:
        assert len(store.calls(rollout_ids=[str(call.rollout_id)])) == 1


def test_with_the_recorded_seed_and_version_the_answer_is_the_recorded_one(
    run: Run, call: Call, replayer: Replayer
) -> None:
    how = Sampling(call.params["temperature"], call.params["max_tokens"], call.params["seed"])
    wait(replayer.start(run.folder, call, targets(run.folder)["policy@0"], how))
    again = replays_of(run.folder, call.id, most=1)[0]
    assert again.response_ids == call.response_ids


def test_one_replay_is_made_at_a_time(run: Run, call: Call, replayer: Replayer) -> None:
    target = targets(run.folder)["policy@2"]
    first = replayer.start(run.folder, call, target, GREEDY)
    if not first.is_over:
        with pytest.raises(ConfigError, match="another one is under way"):
            replayer.start(run.folder, call, target, GREEDY)
    wait(first)


def test_an_idle_gateway_ends(run: Run, call: Call) -> None:
    replayer = Replayer(idle_s=0.1)
    wait(replayer.start(run.folder, call, targets(run.folder)["agentrl-tiny"], GREEDY))
    until = time.monotonic() + 20
    while replayer.is_warm and time.monotonic() < until:
        time.sleep(0.05)
    assert not replayer.is_warm


def test_the_page_shows_both_answers_and_ends_the_gateway_with_the_pages(
    run: Run, call: Call
) -> None:
    app = create_app(Path(run.folder.root.parent))
    path = f"/runs/run/calls/{quote(call.id)}/replay"
    with TestClient(app) as client:
        form = {"model": "policy@2", "temperature": "0", "max_tokens": "16", "seed": ""}
        refused = client.post(path, data=form | {"temperature": "hot"})
        assert refused.status_code == 400
        assert "temperature is a number" in refused.text
        assert client.post(path, data=form | {"model": "policy@9"}).status_code == 400
        text = client.post(path, data=form).text  # follows to the page
        assert "policy@2: " in text
        wait(app.state.replayer.last)
        made = replays_of(run.folder, call.id, most=1)[0]
        vocabularies = Vocabularies()
        while (vocabulary := vocabularies.of(run.folder.read_config())) is None:
            pass
        text = client.get(path).text
        for one in (call, made):
            assert (
                vocabulary.text(one.response_ids)
                .replace("<", "&lt;")
                .replace(">", "&gt;")
                .replace("'", "&#39;")
                in text
            )
        assert "Recorded: policy@0" in text
        assert "Replay: policy@2" in text
        tokens = client.get(f"/runs/run/replays/{quote(made.id)}/tokens").text
        assert "not trained on: no rollout" in tokens
        process = app.state.replayer._gateway.pid
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
