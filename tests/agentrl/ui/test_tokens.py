"""The tokens of a call, through the app over a real store and real files of tokens."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from ui_pages import record_run, tokens_of

from agentrl.runs.folder import RunFolder
from agentrl.runs.token_records import save_step
from agentrl.ui.app import create_app
from agentrl_tracer.schemas import Call
from agentrl_tracer.store import Store
from agentrl_trainer.data.batch_assembly import SeenRow, StepBatch
from agentrl_trainer.data.training_row import to_training_row
from agentrl_trainer.data.trajectories import Trajectory

ODD = "<script>é\x1b\u202e\n"


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """``first`` and ``second`` of a conversation that step 2 trained on, ``odd``, ``long``, one
    that was ``served``; and the ``client`` of their pages."""
    root = tmp_path_factory.mktemp("runs")
    record_run(root, "run")
    folder = RunFolder(root / "run")
    with contextlib.closing(Store(str(folder.store))) as store:
        ids = [one.id for one in store.rollouts(folder.run_id.read_text(), step=2)]
        first, second = [c for c in store.calls(rollout_ids=ids) if c.trained_step == 2][:2]
        odd = like(first, "odd", ODD)
        long = like(first, "long", "one two " * 2100, rollout_id=None, attempt_id=None)
        store.write_calls("boot", [], [odd, long], 0)
    with contextlib.closing(Store(str(root / "serve.db"))) as store:
        served = like(first, "served", "hi", run_id=None, rollout_id=None, attempt_id=None)
        store.write_calls("boot", [], [served], 0)
    row = to_training_row(Trajectory("policy", [first, second]), {first.id: 1.25, second.id: -0.5})
    trainer = np.asarray(row.logprobs[1:], np.float32) + np.float32(0.25)
    seen = StepBatch(first_pass=[SeenRow(row, [first.id, second.id], trainer)])
    save_step(folder, 2, [first, second], [seen])
    with TestClient(create_app(root)) as client:
        while "vocabulary is loading" in client.get("/runs/run/calls/odd/tokens").text:
            pass
        yield {"first": first, "second": second, "odd": odd, "long": long, "client": client}


def like(call: Call, name: str, text: str, **changes: Any) -> Call:
    ids = tokens_of(text)
    top = {"token": "<b>", "bytes": [60, 98, 62], "logprob": -1.5}
    said = [{"token": "<", "bytes": [60], "logprob": 0, "top_logprobs": [top]}]
    return replace(
        call, id=name, response_id=name, seq=9, response_ids=ids, trained_step=None,
        response={"choices": [{"logprobs": {"content": said}}]},
        response_logprobs=[-0.5] * len(ids), **changes,
    )  # fmt: skip


def page(calls: dict[str, Any], name: str, query: str = "", **headers: str) -> str:
    call_id = calls[name].id
    return calls["client"].get(f"/runs/run/calls/{call_id}/tokens{query}", headers=headers).text


def test_each_token_tells_what_sampler_and_trainer_said(calls: dict[str, Any]) -> None:
    call = calls["second"]
    text = page(calls, "second", "?color=ratio")
    titles = re.findall(r'<span class="side(\d)" title="([^"]*)"', text)
    assert len(titles) == len(call.response_ids)
    sampled = call.response_logprobs[0]
    assert titles[0] == (
        "6",
        f"token 1\nid {call.response_ids[0]}\nsampler {sampled:.4f}\ntrainer {sampled + 0.25:.4f}\n"
        f"ratio 1.284\nadvantage -0.5\nversion {call.adapter_version}",
    )
    assert "trained in step 2" in text
    assert ">1.25 up</span>" in text  # the legend
    assert ">0</span>" in page(calls, "second", "?color=advantage")
    assert 'class="kind1"' in page(calls, "second", "?color=version")
    assert text.count("<tr>") == 1 + len(call.response_ids)


def test_a_prompt_says_how_much_of_it_an_earlier_call_had(calls: dict[str, Any]) -> None:
    first, second, text = calls["first"], calls["second"], page(calls, "second")
    shared = len(first.prompt_ids) + len(first.response_ids)
    assert (
        f"Prompt: {len(second.prompt_ids)} tokens; the first {shared} are those of call 0" in text
    )
    assert f'calls/{first.id}/tokens">call 0</a>' in text
    assert "rendered anew: first call" in page(calls, "first")


def test_what_the_trainer_did_not_see_is_no_choice(calls: dict[str, Any]) -> None:
    text = page(calls, "long", "?color=ratio")
    assert "color=version" in text
    assert "color=ratio" not in text
    assert "no verdict yet" in text


def test_htmx_gets_the_part_alone(calls: dict[str, Any]) -> None:
    part = page(calls, "first", **{"hx-request": "true"})
    assert part.lstrip().startswith("<section")
    assert page(calls, "first").startswith("<!doctype html>")


def test_bytes_that_are_no_character_and_hostile_text_are_shown_escaped(
    calls: dict[str, Any],
) -> None:
    text = page(calls, "odd")
    [first] = re.findall(r"<tbody>\n<tr><td>1</td><td>([^<]+)</td>", text)
    assert unescape(first) == "<"
    assert '<th scope="col">alternatives</th>' in text
    assert "<script>é" not in text
    assert "\u202e" not in text
    assert all(said in text for said in (r"\xc3", r"\x1b", "↵"))
    assert tokens_of(ODD)[0] != tokens_of("<")[0] or "&#39;&lt;b&gt;&#39; -1.500" in text


def test_a_long_answer_is_paged_and_quick(calls: dict[str, Any]) -> None:
    count = len(calls["long"].response_ids)
    assert count > 4000
    began = time.process_time()
    text = page(calls, "long")
    assert time.process_time() - began < 0.3
    assert text.count('title="token 2000\n') == 1
    assert 'title="token 2001\n' not in text
    last = page(calls, "long", f"?at={count - 1}")
    assert f'title="token {count}\n' in last
    assert f'at={(count - 1) // 2000 * 2000 - 2000}"' in last
    assert "Next" not in last


def test_served_calls_have_tokens_and_calls_of_another_run_are_not_shown(
    calls: dict[str, Any],
) -> None:
    client = calls["client"]
    assert "does not say which model" in client.get("/served/serve.db/calls/served/tokens").text
    assert client.get("/runs/run/calls/nothing/tokens").status_code == 404
    assert client.get("/runs/run/calls/served/tokens").status_code == 404
