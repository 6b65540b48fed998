"""Responses that refer to earlier ones: by id, by item, after a restart, and not across callers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import openai
import pytest
from conversations import ODD_CALL, extends, one_by_one
from gateway_client import HTTP, post
from official_clients import client
from running_gateway import restarted
from scripted_sampler import OPERATOR_KEY, Running
from speakers import FUNCTION

TOOLS: Any = [{"type": "function", **FUNCTION, "strict": False}]
THOUGHT = "<think>\nhm\n</think>\n\n"


def say(gateway: Running, text: str) -> None:
    gateway.sampler.script = lambda *_: one_by_one(gateway.renderer, text)


def outside(gateway: Running) -> openai.OpenAI:
    """A client of ``agentrl serve``, without a rollout."""
    return openai.OpenAI(base_url=gateway.base_url(), api_key=OPERATOR_KEY, max_retries=0)


def result_of(answer: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "50.9 N"}
        for item in answer.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("restart", [False, True], ids=["", "restart"])
@pytest.mark.parametrize("by", ["id", "items"])
def test_a_conversation_keeps_its_tokens(gateway: Running, by: str, restart: bool) -> None:
    """Five turns with tools and thoughts, streamed and whole, in ids that no tokenizer chooses."""
    texts = ["Hi. ", f"Look.\n{ODD_CALL}\n{ODD_CALL}", "Done.", f"{ODD_CALL}", " spaces \n"]
    said: list[Any] = []
    running, answer = gateway, None
    for turn, text in enumerate(texts):
        more: Any = [{"role": "user", "content": f"Turn {turn}"}]
        if answer is not None:
            more = result_of(answer) or more
        if by == "items":
            said += (
                [{"type": "item_reference", "id": i.id} for i in answer.output] if answer else []
            )
            said += more
        asked: Any = {"input": said} if by == "items" else {"input": more}
        if by == "id" and answer is not None:
            asked["previous_response_id"] = answer.id

        def create(on: Running, asked: Any = asked, turn: int = turn, text: str = text) -> Any:
            say(on, text)
            with client(on) as api:
                if turn % 2:
                    with api.responses.stream(model="policy", tools=TOOLS, **asked) as events:
                        return events.get_final_response()
                return api.responses.create(model="policy", tools=TOOLS, **asked)

        if restart:
            with restarted(gateway) as running:
                answer = create(running)
        else:
            answer = create(running)
        assert answer.previous_response_id == asked.get("previous_response_id")
    calls = gateway.calls(gateway.claims[0])
    assert len(calls) == 5
    for earlier, later in pairwise(calls):
        assert extends(later, earlier)
        assert later.params["continued"]
        assert "branched" not in later.params


def test_thoughts_and_stops_and_limits(gateway: Running) -> None:
    with client(gateway) as api:
        for text, more, kept in (
            (f"{THOUGHT}One.", {}, f"{THOUGHT}One."),
            ("One. STOP Two.", {"extra_body": {"stop": "STOP"}}, "One. "),
            ("One. Two.", {"max_output_tokens": 4}, "One."),
        ):
            say(gateway, text)
            first = api.responses.create(model="policy", input="Hello", **more)
            with restarted(gateway) as after, client(after) as again:
                again.responses.create(model="policy", input="Again", previous_response_id=first.id)
            call, later = gateway.calls(gateway.claims[0])[-2:]
            tokens = len(call.prompt_ids) + len(kept)
            assert later.prompt_ids[:tokens] == (call.prompt_ids + call.response_ids)[:tokens]
            assert f"{kept}<|im_end|>\n<|im_start|>user\nAgain" in gateway.renderer.decode_raw(
                later.prompt_ids
            )


def test_outside_rollouts(gateway: Running) -> None:
    with outside(gateway) as api:
        say(gateway, "One.")
        first = api.responses.create(model="policy", input="Hello")
        say(gateway, "Two.")
        second = api.responses.create(model="policy", input="Again", previous_response_id=first.id)
        assert api.responses.retrieve(second.id) == second
    calls = [gateway.store.call(answer.id) for answer in (first, second)]
    assert calls[0] is not None
    assert calls[1] is not None
    assert extends(calls[1], calls[0])


def test_a_stored_response(gateway: Running) -> None:
    with client(gateway) as api:
        say(gateway, f"{THOUGHT}Look.\n{ODD_CALL}")
        first = api.responses.create(model="policy", input="Hello", tools=TOOLS)
        second = api.responses.create(
            model="policy", input=result_of(first), previous_response_id=first.id, tools=TOOLS
        )
        assert api.responses.retrieve(first.id) == first
        assert api.responses.retrieve(second.id) == second
        with pytest.raises(openai.APIStatusError) as deleted:
            api.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as conversation:
            api.conversations.create()
    assert "store: false" in deleted.value.message
    assert "store: false" in conversation.value.message


def refusals(gateway: Running, key: str, base: str, response_id: str) -> list[Any]:
    """What a caller is told about a response, by each way, without its id."""
    body: Any = {"model": "policy", "input": "Again"}
    item: Any = {"type": "item_reference", "id": response_id.replace("resp", "msg")}
    answers = [
        post(f"{base}/responses", key, body | {"previous_response_id": response_id}),
        post(f"{base}/responses", key, body | {"input": [item]}),
        HTTP.get(f"{base}/responses/{response_id}", headers={"x-api-key": key}),
    ]
    digits = response_id.removeprefix("resp_")
    return [(one.status_code, one.text.replace(digits, "ID")) for one in answers]


def test_others_responses_are_as_unknown_ones(gateway: Running) -> None:
    first, other = gateway.claims[:2]
    with client(gateway, first) as api, outside(gateway) as operator:
        mine = api.responses.create(model="policy", input="Hello").id
        unstored = api.responses.create(model="policy", input="Hello", store=False).id
        served = operator.responses.create(model="policy", input="Hello").id
    unknown = "resp_" + 24 * "0"
    for key, base, ids in (
        (other.key, gateway.base_url(other), [mine, served]),
        (first.key, gateway.base_url(first), [unstored, served]),
        (OPERATOR_KEY, gateway.base_url(), [mine]),
    ):
        expected = refusals(gateway, key, base, unknown)
        assert [status for status, _ in expected] == [400, 400, 404]
        for response_id in ids:
            assert refusals(gateway, key, base, response_id) == expected
    # Two keys of clients that need none.
    assert len(gateway.calls(other)) == 0


def test_keys_of_clients_without_an_operator(start: Any) -> None:
    gateway: Running = start(operator_key=None)
    body: Any = {"model": "policy", "input": "Hello"}
    made = post(f"{gateway.base_url()}/responses", "sk-one", body).json()["id"]
    again = body | {"previous_response_id": made}
    for key, status in (("sk-one", 200), ("sk-two", 400), (None, 400)):
        assert post(f"{gateway.base_url()}/responses", key, again).status_code == status


def test_a_response_is_read_once_for_all_its_items(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    find = gateway.store.call
    monkeypatch.setattr(gateway.store, "call", lambda name: read.append(name) or find(name))
    with client(gateway) as api:
        say(gateway, "One.")
        [item] = api.responses.create(model="policy", input="Hello").output
        reference: Any = {"type": "item_reference", "id": item.id}
        api.responses.create(model="policy", input=[reference] * 50)
        with pytest.raises(openai.BadRequestError, match="not found"):
            api.responses.create(model="policy", input=[reference, {**reference, "id": "msg_1"}])
    assert len(read) == 2


def test_text_around_a_tool_call_is_told_once(gateway: Running) -> None:
    """It is streamed as two messages, which a client refers to one by one."""
    asked: Any = [{"role": "user", "content": "Where?"}]
    say(gateway, f"First. {ODD_CALL} Then more.")
    with client(gateway) as api:
        with api.responses.stream(model="policy", tools=TOOLS, input=asked) as events:
            done = [event for event in events if event.type == "response.output_item.done"]
            answer = events.get_final_response()
        assert [event.item.type for event in done] == ["message", "function_call", "message"]
        asked += [{"type": "item_reference", "id": event.item.id} for event in done]
        say(gateway, "Done.")
        api.responses.create(model="policy", tools=TOOLS, input=[*asked, *result_of(answer)])
    first, second = gateway.calls(gateway.claims[0])
    assert extends(second, first)
    assert second.params["continued"]


def test_what_was_not_completed_is_not_continued(gateway: Running) -> None:
    gateway.sampler.fail_after = 1
    claim = gateway.claims[0]
    url = f"{gateway.base_url(claim)}/responses"
    body: Any = {"model": "policy", "input": "Hello", "stream": True}
    with HTTP.stream("POST", url, json=body, headers={"x-api-key": claim.key}) as answer:
        text = answer.read().decode()
    assert "response.failed" in text
    [call] = gateway.calls(claim)
    with client(gateway) as api:
        assert api.responses.retrieve(call.response_id).status == "failed"
        with pytest.raises(openai.BadRequestError) as caught:
            api.responses.create(
                model="policy", input="Again", previous_response_id=call.response_id
            )
    assert caught.value.code == "response_not_completed"
    assert "is failed; it cannot be continued" in caught.value.message
