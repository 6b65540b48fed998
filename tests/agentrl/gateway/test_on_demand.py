"""Replays: a real run's calls asked again of its own versions, through a gateway on demand."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient
from training_run import Run

from agentrl.gateway.on_demand import AGENT, Replay, Replayer, Sampling, replays_of, targets
from agentrl.history.rollout.vocabulary import Vocabularies
from agentrl.runs.folder import RunFolder
from agentrl.ui.app import create_app
from agentrl_tracer.schemas import Call, CallState, SkipReason

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
def client(run: Run) -> Iterator[TestClient]:
    with TestClient(create_app(Path(run.folder.root.parent))) as client:
        yield client
        process = client.app.state.replayer._gateway.pid  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):  # it ended with the pages
        os.kill(process, 0)


@pytest.fixture
def replayer(client: TestClient) -> Replayer:
    return client.app.state.replayer  # type: ignore[attr-defined]


def wait(replay: Replay | None) -> None:
    assert replay is not None
    replay.answer.result()


def test_a_run_whose_folder_is_elsewhere_has_no_logs_yet(
    run: Run, call: Call, tmp_path: Path
) -> None:
    elsewhere = RunFolder(tmp_path)
    elsewhere.write_json(elsewhere.config, run.folder.read_config())
    elsewhere.store.symlink_to(run.folder.store)
    replayer = Replayer()
    try:
        wait(replayer.start(elsewhere, call, targets(elsewhere)["agentrl-tiny"], GREEDY))
    finally:
        replayer.close()


def test_a_call_is_asked_again_of_each_version_and_the_books_still_balance(
    run: Run, call: Call, replayer: Replayer
) -> None:
    before = run.accounting()
    known = targets(run.folder)
    assert list(known) == ["policy@2", "policy@1", "policy@0", "agentrl-tiny"]
    for one in [replayer.start(run.folder, call, target, GREEDY) for target in known.values()]:
        wait(one)
    made = replays_of(run.folder, call.id)
    assert [(one.adapter, one.adapter_version) for one in made] == [
        (None, None), ("policy", 0), ("policy", 1), ("policy", 2),
    ]  # fmt: skip
    for one in made:
        assert one.prompt_ids == call.prompt_ids
        assert one.agent == AGENT
        assert one.state is CallState.COMPLETED
        assert one.rollout_id is None
        assert one.skip_reason is SkipReason.NO_ROLLOUT
    tiny, first, _, third = made
    assert tiny.response_ids == first.response_ids  # a new adapter is the base model
    assert first.response_ids != third.response_ids
    assert run.accounting() == before  # which must balance


def test_a_call_that_continued_a_response_is_asked_again(
    run: Run, call: Call, replayer: Replayer
) -> None:
    """Another server knows no such response; the recorded input has it."""
    asked = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    asked.append({"role": "user", "content": "Again"})
    sent = {"model": "policy", "input": asked, "previous_response_id": "resp_" + 24 * "0"}
    recorded = replace(call, request=sent, prompt_ids=[])
    wait(replayer.start(run.folder, recorded, targets(run.folder)["agentrl-tiny"], GREEDY))
    made = replays_of(run.folder, call.id)[0]
    assert made.state is CallState.COMPLETED
    assert (made.request or {})["input"] == asked


def test_with_the_recorded_seed_and_version_the_answer_is_the_recorded_one(
    run: Run, call: Call, replayer: Replayer
) -> None:
    params = {name: call.params[name] for name in Sampling.model_fields}
    wait(replayer.start(run.folder, call, targets(run.folder)["policy@0"], Sampling(**params)))
    assert replays_of(run.folder, call.id)[0].response_ids == call.response_ids


def test_an_idle_gateway_ends(run: Run, call: Call) -> None:
    replayer = Replayer(idle_s=0.1)
    wait(replayer.start(run.folder, call, targets(run.folder)["policy@2"], GREEDY))
    until = time.monotonic() + 20
    while replayer.is_warm and time.monotonic() < until:
        time.sleep(0.05)
    assert not replayer.is_warm
    replayer.close()


def test_the_page_shows_both_answers(
    run: Run, call: Call, client: TestClient, replayer: Replayer
) -> None:
    path = f"/runs/run/calls/{quote(call.id)}/replay"
    form = {"model": "policy@2", "temperature": "0", "max_tokens": "16", "seed": ""}
    refused = client.post(path, data=form | {"temperature": "hot"})
    assert refused.status_code == 400
    assert "temperature: got &#39;hot&#39;, but input should be a valid number" in refused.text
    assert client.post(path, data=form | {"model": "policy@9"}).status_code == 400
    assert "policy@2" in client.post(path, data=form).text  # follows to the page
    wait(replayer.last)
    vocabularies = Vocabularies()
    while (vocabulary := vocabularies.of(run.folder.read_config())).is_loading:
        pass
    text = client.get(path).text.replace("&#39;", "&#x27;")
    for one in (call, replays_of(run.folder, call.id)[0]):
        assert escape(vocabulary.text(one.response_ids)) in text
    assert "Recorded: policy@0" in text
    assert "Replay: policy@2" in text
