"""Rollouts, calls, groups and tasks, as pages over recorded runs."""

from __future__ import annotations

import re
from concurrent.futures import Future
from html import unescape
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from store_records import call_of, claimed, enqueue, record_answer
from ui_pages import HOSTILE, LONG_LINE, TOOL_ANSWER, Recorded, begun, fill_indexes

from agentrl.gateway.on_demand import Replay, Target
from agentrl.history.rollout.vocabulary import Vocabulary
from agentrl.ui.app import create_app
from agentrl_tracer.schemas import AttemptState, Json, Purpose, Reward
from agentrl_tracer.store.calls import Delivery


def _rollout(recorded: Recorded, name: str) -> str:
    return f"{recorded.run}/rollouts/{recorded.ids[name]}"


def test_a_rollout_shows_its_trace_conversations_and_output(client: TestClient, recorded) -> None:
    text = client.get(_rollout(recorded, "first")).text
    for said in ("invoke_agent solver", "execute_tool look_up", "policy@0", "correct", "clarity"):
        assert said in text, said
    shown = [found.start() for found in re.finditer('id="call-chatcmpl-', text)]
    assert len(shown) == 3
    [earlier] = re.findall(r'href="([^"]+)">Earlier messages of this conversation: 2<', text)
    assert "Which number is 0?" not in text[shown[1] :]
    assert "Which number is 0?" in client.get(earlier).text
    assert text.count(TOOL_ANSWER) >= 2  # the tool's span, and the message
    assert "<strong>I am" in text
    assert "Let me see." in text[text.index("Reasoning") :]
    assert "continues an earlier call's exact tokens" in text
    assert "rendered anew: first call" in text
    assert re.search(r'<rect x="[\d.]+" y="2" width="[\d.]+"', text)
    assert "asking about" in text[text.index("<h2>Output</h2>") :]
    assert 'style="' not in text


def test_hostile_texts_are_shown_and_do_nothing(client: TestClient, recorded: Recorded) -> None:
    for path in (_rollout(recorded, "hostile"), _rollout(recorded, "failed"),
                 f"{recorded.run}/groups/{recorded.ids['group']}"):  # fmt: skip
        text = client.get(path).text
        assert not re.search(r"<script(?! src=\"/static/)|<img|<svg onload|<style|\x1b", text)
        assert "javascript:" not in re.findall(r'href="([^"]*)"', text)
        assert "&lt;script&gt;window.hacked" in text


def test_a_long_line_is_cut_and_can_be_saved_whole_as_text(client: TestClient, recorded) -> None:
    page = client.get(_rollout(recorded, "long"))
    assert len(page.content) < 300_000
    link = re.findall(r'href="([^"]+/request.json)"', page.text)[0]
    saved = client.get(link)
    assert saved.headers["content-type"] == "text/plain; charset=utf-8"
    assert saved.headers["content-disposition"].startswith("attachment")
    assert LONG_LINE.strip() in saved.text
    raw = client.get(link.replace("request.json", "raw")).text
    assert len(raw) < 100_000
    assert "@request.json" in raw


def test_the_raw_request_is_a_command_with_the_key_left_out(client: TestClient, recorded) -> None:
    text = client.get(_rollout(recorded, "first")).text
    [link, *_] = re.findall(r'hx-get="([^"]+/raw)"', text)
    raw = client.get(link, headers={"hx-request": "true"}).text
    assert "<html" not in raw
    assert "Authorization: Bearer $OPENAI_API_KEY" in unescape(raw)
    assert "/v1/chat/completions" in raw
    assert "ended with the run" in raw
    assert "<html" in client.get(link).text


def test_the_output_of_an_attempt_is_saved_as_text(client: TestClient, recorded: Recorded) -> None:
    path = f"{_rollout(recorded, 'hostile')}/log"
    saved = client.get(f"{path}/1")
    assert saved.headers["content-type"] == "text/plain; charset=utf-8"
    assert saved.text.endswith(HOSTILE)
    assert client.get(f"{path}/2").status_code == 404
    assert client.get(f"{recorded.run}/rollouts/none").status_code == 404
    assert client.get(f"{recorded.run}/calls/none").status_code == 404


def test_a_group_shows_rewards_advantages_and_where_tokens_part(client: TestClient, recorded):
    rows = client.get(f"{recorded.run}/rollouts?where=step==1 and purpose=='train'").text
    link = re.findall(r'href="([^"]+/groups/[^"]+)"', rows)[0]
    text = client.get(link).text
    assert re.search(r"[+-]0\.\d{4}", text)
    assert "the same for all 4" in text
    assert "<mark>" in text
    assert "messages that all have" in text
    assert client.get(f"{recorded.run}/groups/none").status_code == 404


@pytest.mark.parametrize(
    ("adapters", "shown"),
    [
        ({}, ["+0.5000", "-0.5000"]),
        ({"writer": {"rewards": ["clarity"]}}, []),
        ({"writer": {}, "searcher": {}}, []),
    ],
)
def test_advantages_are_not_computed_where_rewards_do_not_say_them(
    adapters: Json, shown: list[str], tmp_path: Path
) -> None:
    with begun(tmp_path, "group", "train", {"adapters": adapters}) as (store, run_id):
        enqueue(store, run_id, {"n": 7}, 2, step=1)
        for value in (1.0, 0.0):
            claim = claimed(store)
            call = call_of(claim, claim.attempt_id, response_ids=[3], response_logprobs=[-1.0])
            earned = Reward(claim.attempt_id, claim.rollout_id, "reward", value, "key")
            store.write_calls("boot", [], [call, Delivery(claim.attempt_id, [], [earned])], 1)
            store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    fill_indexes(tmp_path)
    with TestClient(create_app(tmp_path)) as client:
        text = client.get("/runs/group/groups/g").text
    assert re.findall(r"[+-]0\.\d{4}", text) == shown


def test_where_tokens_part_is_marked_wherever_it_is(tmp_path: Path) -> None:
    with begun(tmp_path, "far", "train") as (store, run_id):
        enqueue(store, run_id, {"n": 7}, 3, step=1)
        for different, sampled in ((5, 11), (300, 12), (300, 13)):
            claim = claimed(store)
            ids = [10] * different + [sampled] + [10] * 400
            call = call_of(claim, claim.attempt_id, response_ids=ids, response_logprobs=[-1.0])
            store.write_calls("boot", [], [call], 1)
            store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    fill_indexes(tmp_path)
    with TestClient(create_app(tmp_path)) as client:
        client.app.state.vocabularies.of = lambda _: Vocabulary(fault="no model")  # type: ignore
        text = client.get("/runs/far/groups/g").text
    assert "The first 7 tokens are the same for all 3" in text  # 2 of the prompt
    assert re.findall("<mark> ([0-9]+)</mark>", text) == ["11", "12", "13"]
    assert text.count('<span class="faint">from token 222 on: </span>') == 2


def test_tasks_of_run_and_check_are_found_in_their_splits(tmp_path: Path) -> None:
    with begun(tmp_path, "asked", "run") as (store, run_id):
        rollout = record_answer(store, run_id, Purpose.EVAL, 0, ("Who?", "Me."), 0.5, split="run")
    fill_indexes(tmp_path)
    with TestClient(create_app(tmp_path)) as client:
        for page in (f"rollouts/{rollout}", "rollouts", "groups/eval-0"):
            [link] = re.findall(
                r'href="([^"]+/tasks/[^"]+)"', client.get(f"/runs/asked/{page}").text
            )
            assert rollout in client.get(link).text, page
        text = client.get(f"/runs/asked/rollouts/{rollout}").text
        assert unescape(text[text.index("<summary>Task") :]).index('"n": 7') < 200


def test_a_task_shows_its_answers_in_order_of_steps(client: TestClient, recorded) -> None:
    text = client.get(f"{recorded.run}/tasks/eval/1").text
    assert text.index("I am 13.") < text.index("the number after 12")
    steps = re.findall(r'<td class="figure">(\d)</td>\n<td><a class="row"', text)
    assert steps == ["0", "2", "4"]
    assert client.get(f"{recorded.run}/tasks/eval/99").status_code == 404
    assert client.get(f"{recorded.run}/tasks/eval/{'9' * 30}").status_code == 422


def test_links_lead_to_the_rollouts_beside_in_table_group_and_task(client: TestClient, recorded):
    table = client.get(f"{recorded.run}/rollouts?sort=-reward").text
    links = [unescape(link) for link in re.findall(r'class="row" id="[^"]+" href="([^"]+)"', table)]
    assert len(links) == 50
    text = unescape(client.get(links[7]).text)
    assert f'href="{links[6]}" rel="prev"' in text
    assert f'href="{links[8]}" rel="next"' in text
    assert "in the group" in text
    last = client.get(_rollout(recorded, "wrong")).text
    assert "Previous</a>" in last[: last.index("in the task")]
    assert "Next</a>" not in last[: last.index("in the task")]


def test_the_table_has_a_column_for_each_named_reward(client: TestClient, recorded) -> None:
    text = client.get(f"{recorded.run}/rollouts?sort=-rewards.clarity").text
    assert re.search(r'aria-sort="descending"><a [^>]+>clarity</a>', text)
    assert "Sampled tokens" in text
    wrong = client.get(f"{recorded.run}/rollouts?where=reward<").text
    assert wrong.count('role="alert"') == 1
    assert "0 rollouts" not in wrong
    assert "No rollout matches" not in wrong
    assert (
        "1 rollout<"
        in client.get(f"{recorded.run}/rollouts?where=id=='{recorded.ids['first']}'").text
    )


def test_a_bad_parameter_is_named_on_a_page(client: TestClient, recorded: Recorded) -> None:
    for path, field in (("rollouts?at=abc", "at"), ("evaluations?before=x", "before")):
        answer = client.get(f"{recorded.run}/{path}")
        assert answer.status_code == 422
        assert f"<p>{field}: Input should be a valid integer" in answer.text
    for path in (f"calls?before={10**22}", f"tasks/train/{-(2**63)}"):
        assert 400 <= client.get(f"{recorded.run}/{path}").status_code < 500
    for path in (f"/runs/{'x' * 3000}", f"/sweeps/{'x' * 3000}", f"/compare?run={'x' * 3000}"):
        assert 400 <= client.get(path).status_code < 500


def test_the_form_of_a_replay_keeps_what_it_held(client: TestClient, recorded: Recorded) -> None:
    path = f"{recorded.run}/calls/{recorded.ids['call']}/replay"
    text = client.get(path).text
    model = re.findall("<option[^>]*>([^<]+)</option>", text)[-1]
    for given, said in (
        ({"temperature": "hot", "max_tokens": "7"}, "temperature: "),
        ({"temperature": "1", "max_tokens": "-1"}, "max_tokens: "),
    ):
        answer = client.post(path, data={"model": model, "seed": "", **given})
        assert answer.status_code == 400
        assert f'role="alert">{said}' in answer.text
        assert (
            f'name="temperature" inputmode="decimal" size="5" value="{given["temperature"]}"'
            in answer.text
        )
        assert f"<option selected>{model}</option>" in answer.text
    assert "model: choose one" in client.post(path, data={"temperature": "1"}).text
    asked = Replay(recorded.ids["call"], Target(model), Future())
    asked.answer.set_result(None)
    client.app.state.replayer.last = asked  # type: ignore
    assert f"<option selected>{model}</option>" in client.get(path).text


def test_of_many_calls_the_first_are_shown_and_the_rest_on_demand(tmp_path: Path) -> None:
    with begun(tmp_path, "many", "train") as (store, run_id):
        enqueue(store, run_id, {"n": "\ud800"}, step=1)
        store.end_attempt(claimed(store).attempt_id, AttemptState.ERROR, error="ValueError: odd")
        claim = claimed(store)
        said = [{"role": "user", "content": f"odd \ud800 number {i}"} for i in range(25)]
        calls = [
            call_of(claim, f"c#{i}", seq=i, request={"messages": said[: i + 1]}) for i in range(25)
        ]
        store.write_calls("boot", [], calls, 25)
        store.end_attempt(claim.attempt_id, AttemptState.SUCCEEDED)
    fill_indexes(tmp_path)
    with TestClient(create_app(tmp_path)) as client:
        text = client.get(f"/runs/many/rollouts/{claim.rollout_id}").text
        assert "ValueError: odd" in text
        assert text.count("odd \ufffd number") == 20
        assert text.count("Show this call</a>") == 5
        rest = client.get("/runs/many/calls/c%2324").text
        assert rest.count("odd \ufffd number") == 25
        assert client.get("/runs/many/groups/g").status_code == 200
