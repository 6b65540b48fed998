"""The tokens of a call, through the app over a real store and real files of tokens."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from starlette.testclient import TestClient
from ui_pages import record_run, tokens_of

from agentrl.runs import token_records
from agentrl.runs.folder import RunFolder
from agentrl.ui.app import create_app
from agentrl_tracer.schemas import Call
from agentrl_tracer.store import Store
from agentrl_trainer.data.batch_assembly import SeenRow, StepBatch
from agentrl_trainer.data.training_row import to_training_row
from agentrl_trainer.data.trajectories import Trajectory

HTMX = {"hx-request": "true"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    root = tmp_path_factory.mktemp("runs")
    record_run(root, "run")
    return RunFolder(root / "run")


@pytest.fixture
def client(folder: RunFolder) -> Iterator[TestClient]:
    with TestClient(create_app(folder.root.parent)) as client:
        yield client


@pytest.fixture(scope="module")
def trained(folder: RunFolder) -> list[Call]:
    """The two calls of a conversation that step 2 trained on, with what the trainer saw."""
    with contextlib.closing(Store(str(folder.store))) as store:
        run_id = folder.run_id.read_text()
        ids = [one.id for one in store.rollouts(run_id, step=2)]
        calls = [c for c in store.calls(rollout_ids=ids) if c.trained_step == 2][:2]
    row = to_training_row(Trajectory("policy", calls), {calls[0].id: 1.25, calls[1].id: -0.5})
    trainer = np.asarray(row.logprobs[1:], np.float32) + np.float32(0.25)
    batch = StepBatch(first_pass=[SeenRow(row, [call.id for call in calls], trainer)])
    token_records.save_step(folder, 2, calls, [batch])
    return calls


def record(folder: RunFolder, like: Call, name: str, text: str, **changes: object) -> Call:
    ids = tokens_of(text)
    call = replace(
        like, id=name, response_id=name, seq=9, response_ids=ids, trained_step=None,
        response_logprobs=[-0.5] * len(ids), **changes,
    )  # fmt: skip
    with contextlib.closing(Store(str(folder.store))) as store:
        store.write_calls("boot", [], [call], 0)
    return call


def test_each_token_tells_what_sampler_and_trainer_said(
    client: TestClient, trained: list[Call]
) -> None:
    second = trained[1]
    text = client.get(f"/runs/run/calls/{second.id}/tokens?color=difference").text
    titles = re.findall(r'<span class="side(\d)" title="([^"]*)"', text)
    assert len(titles) == len(second.response_ids)
    sampled = second.response_logprobs[0]
    assert titles[0] == (
        "6",
        f"token 1, id {second.response_ids[0]}\nsampler {sampled:.4f}\n"
        f"trainer {sampled + 0.25:.4f}\ndifference +0.25\nratio 1.284\nadvantage -0.5\n"
        f"adapter version {second.adapter_version}",
    )
    assert "trained on at step 2" in text
    assert ">0.1 up</span>" in text  # the legend
    assert text.count("<tr>") == 1 + len(second.response_ids)


def test_a_prompt_says_how_much_of_it_an_earlier_call_had(
    client: TestClient, trained: list[Call]
) -> None:
    first, second = trained
    text = client.get(f"/runs/run/calls/{second.id}/tokens").text
    shared = len(first.prompt_ids) + len(first.response_ids)
    assert f"Prompt: {len(second.prompt_ids)} tokens; the first {shared} are those of" in text
    assert f'calls/{first.id}/tokens">call 0</a>' in text
    assert "rendered anew: first call" in client.get(f"/runs/run/calls/{first.id}/tokens").text


def test_what_the_trainer_did_not_see_is_no_choice(client: TestClient, folder: RunFolder) -> None:
    with contextlib.closing(Store(str(folder.store))) as store:
        ids = [one.id for one in store.rollouts(folder.run_id.read_text(), step=1)]
        call = store.calls(rollout_ids=ids)[0]
    text = client.get(f"/runs/run/calls/{call.id}/tokens?color=ratio").text
    assert "color=sampler" in text
    assert "color=ratio" not in text
    assert "not kept" in text or "not trained on" in text


def test_htmx_gets_the_part_alone(client: TestClient, trained: list[Call]) -> None:
    path = f"/runs/run/calls/{trained[0].id}/tokens"
    assert client.get(path, headers=HTMX).text.lstrip().startswith("<section")
    assert client.get(path).text.startswith("<!doctype html>")


def test_bytes_that_are_no_character_and_hostile_text_are_shown_escaped(
    client: TestClient, folder: RunFolder, trained: list[Call]
) -> None:
    entry = {"token": "<b>", "bytes": [60, 98, 62], "logprob": -1.5, "top_logprobs": []}
    ids = tokens_of("<script>é\x1b\u202e\n")
    said = [{"token": "x", "bytes": list(text.encode()), "logprob": 0} for text in ("<",)]
    said[0]["top_logprobs"] = [entry]  # type: ignore[assignment]
    response = {"choices": [{"logprobs": {"content": said}}]}
    call = record(folder, trained[0], "odd", "<script>é\x1b\u202e\n", response=response)
    assert call.response_ids == ids
    text = client.get("/runs/run/calls/odd/tokens").text
    assert "<script>é" not in text
    assert r"\xc3" in text
    assert r"\x1b" in text
    assert "\u202e" not in text
    assert "↵" in text
    if ids[0] == tokens_of("<")[0]:
        assert "or &#39;&lt;b&gt;&#39; -1.500" in text


def test_a_long_answer_is_paged_and_quick(
    client: TestClient, folder: RunFolder, trained: list[Call]
) -> None:
    call = record(folder, trained[0], "long", "one two " * 2100)
    count = len(call.response_ids)
    assert count > 4000
    path = "/runs/run/calls/long/tokens"
    client.get(path)
    began = time.process_time()
    text = client.get(path).text
    assert time.process_time() - began < 0.3
    assert text.count("token 2000,") == 1
    assert "token 2001," not in text
    last = client.get(f"{path}?at={count - 1}").text
    assert f"token {count}," in last
    assert f'at={(count - 1) // 2000 * 2000 - 2000}"' in last
    assert "Next" not in last


def test_a_call_of_another_run_is_not_shown(client: TestClient, trained: list[Call]) -> None:
    assert client.get("/runs/run/calls/nothing/tokens").status_code == 404
