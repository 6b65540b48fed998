"""Feedback of people: kept beside what agents emit, and a reward only where it is named."""

from __future__ import annotations

import json

from call_records import call_of, reward, rollout
from command_line import agentrl
from starlette.testclient import TestClient
from ui_pages import HOSTILE, Recorded

from agentrl_tracer.schemas import Feedback
from agentrl_trainer.data.adapter_split import AdapterRule
from agentrl_trainer.data.rewards import human_rewards, rollout_reward

ROLLOUT = rollout("r")


def given(author: str, at: float, score: float, call_id: str | None = None) -> Feedback:
    return Feedback("run", "r", call_id, "quality", author, score=score, created_at=at)


def test_each_persons_newest_score_counts_and_the_mean_is_the_reward() -> None:
    feedback = [given("a", 2, 1.0), given("b", 1, 0.5), given("a", 1, -1.0)]
    [found] = human_rewards(feedback, [ROLLOUT], [], {"human:quality"})
    assert (found.name, found.value) == ("human:quality", 0.75)
    assert rollout_reward(ROLLOUT, [reward("r", 1.0), found]) == 1.75
    assert human_rewards(feedback, [ROLLOUT], [], {"human:other"}) == []
    assert not AdapterRule().counts(found)
    assert AdapterRule(rewards=["human:quality"]).counts(found)
    feedback = [given("a", 1, 1.0, "c1")]
    [found] = human_rewards(feedback, [ROLLOUT], [call_of("r", "c1")], {"human:quality"})
    assert (found.response_id, found.attempt_id) == ("c1", "r-a")


def test_a_form_keeps_feedback_with_its_author_and_overwrites_none(
    client: TestClient, recorded: Recorded
) -> None:
    page = f"{recorded.run}/rollouts/{recorded.ids['first']}"
    form = {"rollout_id": recorded.ids["first"], "author": "Änne <b>", "name": "quality"}
    for more in ({"thumb": "up", "comment": HOSTILE}, {"score": "0.25", "label": "short"}):
        answer = client.post(f"{recorded.run}/feedback", data=form | more, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, f"{page}#feedback")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]
    for wrong in ({"score": "nan"}, {"author": "", "thumb": "up"}, {"comment": "x" * 10_001}, {}):
        assert client.post(f"{recorded.run}/feedback", data=form | wrong).status_code == 400
    shown = client.get(page).text
    assert shown.count("Änne &lt;b&gt;") == 3  # two of the table, one in the form
    assert "<script>window.hacked" not in shown
    lines = client.get(f"{recorded.run}/feedback.jsonl").text.splitlines()
    kept = [json.loads(line) for line in lines]
    assert [(one["thumb"], one["score"]) for one in kept] == [(1, None), (None, 0.25)]
    printed = agentrl("runs", "feedback", recorded.root / recorded.name).stdout
    assert [json.loads(line) for line in printed.splitlines()] == kept
