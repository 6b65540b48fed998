"""OpenAI's Responses API through the real server with the real client."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import openai
import pytest
from official_clients import CALL, client
from scripted_sampler import Running
from speakers import FUNCTION

from agentrl_proxy.protocols.chat import translated_request
from agentrl_proxy.protocols.responses import responses_as_chat

TOOLS: Any = [{"type": "function", **FUNCTION, "strict": False}]
BROKEN = '<tool_call>{"name": "search", "arguments": {"q": "a"}}, oops</tool_call>'
ASKED: Any = {"model": "policy", "input": "hi", "tools": TOOLS}


def plain(items: Any) -> list[dict[str, Any]]:
    """Output items without the ids that differ from answer to answer."""
    return [item.model_dump(exclude_none=True, exclude={"id", "call_id"}) for item in items]


@pytest.mark.parametrize(
    "said",
    [f"<think>\nhm\n</think>\n\nLet me look. {CALL}\n{CALL}", "Just grüße 👍 text", "", BROKEN],
)
def test_items_and_their_events(gateway: Running, said: str) -> None:
    gateway.sampler.script = lambda *_: said
    with client(gateway) as api:
        whole = api.responses.create(**ASKED)
        events: Any = list(api.responses.create(**ASKED, stream=True))
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert plain(final.output) == plain(whole.output)
    items = [item.type for item in whole.output]
    calls = ["function_call"] * said.replace(BROKEN, "").count("</tool_call>")
    assert items == [*(["reasoning"] if "<think>" in said else []), "message", *calls]
    assert len({str(item.id) for item in whole.output}) == len(items)
    assert final.usage == whole.usage
    ids = [call.response_id for call in gateway.calls(gateway.claims[0])]
    assert ids == [whole.id, final.id]
    assert events[0].response.id == final.id
    # Each item is added, grows and is done, one after the other.
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == list(range(len(final.output)))
    assert [event.item for event in done] == final.output
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert kinds.count("response.function_call_arguments.done") == len(calls)
    open_items = set[str]()
    for event in events:
        if event.type == "response.output_item.added":
            open_items = {str(event.item.id)}
        elif event.type == "response.output_item.done":
            open_items.clear()
        elif hasattr(event, "item_id"):
            assert event.item_id in open_items


def test_cut_by_its_limit(gateway: Running) -> None:
    with client(gateway) as api:
        response = api.responses.create(**ASKED, max_output_tokens=3)
        events: Any = list(api.responses.create(**ASKED, max_output_tokens=3, stream=True))
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details == response.incomplete_details


def test_logprobs(gateway: Running) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2} | ASKED
    with client(gateway) as api:
        item: Any = api.responses.create(**asked).output[0]
        events: Any = list(api.responses.create(**asked, stream=True))
    logprobs = item.content[0].logprobs
    [first, second] = gateway.calls(gateway.claims[0])
    assert [one.logprob for one in logprobs] == first.response_logprobs[:-1]
    assert len(logprobs[0].top_logprobs) == 2
    streamed = [
        one.logprob for e in events if e.type == "response.output_text.delta" for one in e.logprobs
    ]
    assert streamed == second.response_logprobs[: len(streamed)]
    assert len(streamed) > 10


def test_fields_that_become_those_of_a_chat() -> None:
    output = [{"type": "input_text", "text": "two"}]
    body = {
        "model": "m",
        "input": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "search", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "function_call_output", "call_id": "c2", "output": output},
        ],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "search"},
    }
    chat = translated_request(responses_as_chat, body)
    made = [(message["role"], message.get("content")) for message in chat.messages]
    assert made[0] == ("developer", "d")
    assert [role for role, _ in made] == ["developer", "user", "assistant", "tool", "tool"]
    assert [call["id"] for call in chat.messages[2]["tool_calls"]] == ["c1", "c2"]
    assert [content for role, content in made if role == "tool"] == ["one", "two"]
    assert chat.tools is not None
    assert chat.tools[0]["function"]["parameters"] == FUNCTION["parameters"]
    assert chat.raw == body


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    """Least of all LiteLLM, which our own model needs in no protocol."""
    code = (
        "import sys, agentrl_proxy.app\n"
        "from agentrl_proxy.protocols.messages import messages_as_chat\n"
        "from agentrl_proxy.protocols.responses import responses_as_chat\n"
        "from agentrl_proxy.providers.requests import translated_parts\n"
        "translated_parts(responses_as_chat, {'model': 'm', 'input': 'x'}, None)\n"
        "messages = [{'role': 'user', 'content': 'x'}]\n"
        "asked = {'model': 'm', 'messages': messages, 'max_tokens': 1}\n"
        "translated_parts(messages_as_chat, asked, None)\n"
        "print(*(m for m in ('litellm', 'torch', 'transformers', 'openai') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_tells_what_was_done(gateway: Running, stream: bool) -> None:
    """Nothing is stored, nothing is truncated, and no built-in tool is called too often."""
    asked: Any = {"max_tool_calls": 3, "store": True, "truncation": "auto", "metadata": {"a": "b"}}
    with client(gateway) as api:
        if stream:
            with api.responses.stream(**ASKED, **asked) as events:
                answer: Any = events.get_final_response()
        else:
            answer = api.responses.create(**ASKED, **asked)
        with pytest.raises(openai.BadRequestError) as caught:
            api.responses.create(model="policy", input="word " * 3000, truncation="auto")
    assert (answer.store, answer.truncation, answer.max_tool_calls) == (False, "disabled", 3)
    assert (answer.status, answer.error, answer.metadata) == ("completed", None, {"a": "b"})
    assert caught.value.code == "context_length_exceeded"
