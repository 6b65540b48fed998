"""A conversation that goes on keeps its exact tokens; one that was changed branches."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import pairwise
from typing import Any

import openai
import pytest
from conversations import ODD_CALL, echo, extends, one_by_one
from official_clients import TOOLS, client
from scripted_sampler import Running

from agentrl_proxy.rendering.continuity import (
    Branch,
    ConversationKey,
    Conversations,
    Prompt,
    Said,
    remember_reply,
    render_prompt,
)
from agentrl_proxy.rendering.renderer import Renderer

SYSTEM = {"role": "system", "content": "You are helpful."}


def converse(gateway: Running, api: openai.OpenAI, messages: list[Any], said: str) -> Any:
    gateway.sampler.script = lambda *_: one_by_one(gateway.renderer, said)
    answer = api.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    return answer.choices[0].message


def test_five_turns_with_tools_are_one_row(gateway: Running) -> None:
    messages: list[Any] = [SYSTEM, {"role": "user", "content": "Where is Köln?"}]
    with client(gateway) as api:
        for turn in range(5):
            tool = turn % 2 == 0
            answer = converse(gateway, api, messages, ODD_CALL if tool else f"Turn {turn}. ")
            assert bool(answer.tool_calls) == tool
            messages.append(echo(answer))
            if tool:
                result = {"role": "tool", "tool_call_id": "theirs-0", "content": "50.9 N"}
                messages.append(result)
            else:
                messages.append({"role": "user", "content": f"And {turn}?"})
    calls = gateway.calls(gateway.claims[0])
    assert len(calls) == 5
    for earlier, later in pairwise(calls):
        assert extends(later, earlier)
        assert later.params["continued"]
    # What was added reads as the template writes it.
    known = len(calls[0].prompt_ids) + len(calls[0].response_ids)
    delta = gateway.renderer.decode_raw(calls[1].prompt_ids[known:])
    assert delta == (
        "\n<|im_start|>user\n<tool_response>\n50.9 N\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert gateway.stats["continued"] == 4
    assert gateway.stats["branched"] == {"first_call": 1}


def test_whole_numbers_may_come_back_as_javascript_writes_them(gateway: Running) -> None:
    asked = '{"name": "search", "arguments": {"n": 5.0, "at": [{"x": -2.0}]}}'
    call = f"<tool_call>\n{asked}\n</tool_call>"
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    with client(gateway) as api:
        messages.append(echo(converse(gateway, api, messages, call)))
        [made] = messages[1]["tool_calls"]
        assert "5.0" in made["function"]["arguments"]
        made["function"]["arguments"] = '{"n":5,"at":[{"x":-2}]}'
        result = {"role": "tool", "tool_call_id": made["id"], "content": "50.9 N"}
        converse(gateway, api, [*messages, result], "Done.")
        made["function"]["arguments"] = '{"n":5.5,"at":[{"x":-2}]}'
        converse(gateway, api, [*messages, result], "Done.")
    first, same, edited = gateway.calls(gateway.claims[0])
    assert extends(same, first)
    assert edited.params["branched"] == "history_edited"


def test_with_ordinary_tokens_it_is_what_plain_rendering_gives(gateway: Running) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    gateway.sampler.script = lambda *_: "I'm Qwen."
    with client(gateway) as api:
        for _ in range(3):
            api.chat.completions.create(model="policy", messages=messages)
            messages += [
                {"role": "assistant", "content": "I'm Qwen."},
                {"role": "user", "content": "Again"},
            ]
    for call in gateway.calls(gateway.claims[0]):
        assert call.request is not None
        assert call.prompt_ids == gateway.renderer.render(call.request["messages"])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("reply", "history_edited"),
        ("question", "history_edited"),
        ("tools", "tools_changed"),
        ("attempt", "first_call"),
        ("model", "model_changed"),
    ],
)
def test_changed_history_branches(gateway: Running, change: str, why: str) -> None:
    asked = {"role": "user", "content": "Hello"}
    tools = TOOLS
    with client(gateway) as api:
        answer = converse(gateway, api, [asked], "I'm Qwen.")
        messages: list[Any] = [asked, echo(answer), {"role": "user", "content": "Again"}]
        if change == "reply":
            messages[1] = {"role": "assistant", "content": "I'm someone else."}
        elif change == "question":
            messages[0] = {"role": "user", "content": "Hello!"}
        elif change == "tools":
            tools = [*TOOLS, {"type": "function", "function": {"name": "other"}}]
        claim = gateway.claims[1 if change == "attempt" else 0]
        with client(gateway, claim) as other:
            other.chat.completions.create(
                model="base" if change == "model" else "policy", messages=messages, tools=tools
            )
    later = gateway.calls(claim)[-1]
    assert not later.params["continued"]
    assert later.prompt_ids == gateway.renderer.render(messages, tools)
    assert later.params["branched"] == why
    assert gateway.stats["branched"] == Counter(["first_call", why])


NAMED = "{{ m.name or m.role }}"


def template(role: str = "{{ m.role }}", content: str = "{{ m.content }}") -> str:
    return (
        "{%- for m in messages -%}<|im_start|>" + role + "\n" + content + "<|im_end|>\n"
        "{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )


def with_template(tokenizer: Any, source: str) -> Renderer:
    made = copy.deepcopy(tokenizer)
    made.chat_template = source
    return Renderer(made)


def two_turns(renderer: Renderer, said: str, **changed: Any) -> Prompt:
    """The prompt after a reply that came back with changes of the agent."""
    known, asked = Conversations(), [{"role": "user", "content": "Hello", "name": "ann"}]
    prompt = render_prompt(renderer, known, asked, None, None)
    reply = {"role": "assistant", "content": said}
    ids = one_by_one(renderer, said)
    remember_reply(renderer, known, prompt, reply, ids, said, cut=False)
    more = [*asked, reply | changed, {"role": "user", "content": "?"}]
    after = render_prompt(renderer, known, more, None, None)
    if after.continues is not None:
        assert after.ids[: len(prompt.ids) + len(ids)] == prompt.ids + ids
    else:
        assert after.ids == renderer.render(more)
    return after


@pytest.mark.parametrize(
    ("source", "said", "changed", "continues"),
    [
        # Named agents of LangGraph, agent-framework and semantic-kernel.
        (template(), "One.", {"name": "planner"}, True),
        (template(NAMED), "One.", {"name": "planner"}, False),
        (template(), "One.", {"refusal": None, "audio": None, "annotations": [], "x": 1}, True),
        (template(), "One.", {"content": [{"type": "text", "text": "One."}]}, True),
        # CrewAI and others strip replies.
        (template(), " One.\n", {"content": "One."}, False),
        (template(content="{{ m.content | trim }}"), " One.\n", {"content": "One."}, True),
        (template(content="{{ m.content | trim }}"), "One.", {"content": "Two."}, False),
    ],
)
def test_messages_are_compared_as_the_template_writes_them(
    tokenizer: Any, source: str, said: str, changed: dict[str, Any], continues: bool
) -> None:
    after = two_turns(with_template(tokenizer, source), said, **changed)
    assert (after.continues is not None) == continues
    assert after.branched == (None if continues else Branch.HISTORY_EDITED)


def test_named_agents_continue_with_tools_and_ids_of_their_own(gateway: Running) -> None:
    messages: list[Any] = [SYSTEM, {"role": "user", "content": "Where is Köln?", "name": "user"}]
    with client(gateway) as api:
        for turn in range(4):
            answer = converse(gateway, api, messages, ODD_CALL if turn % 2 else f"Turn {turn}.")
            messages.append(echo(answer) | {"name": "planner"})
            if answer.tool_calls:
                messages.append({"role": "tool", "tool_call_id": "", "content": "50.9 N"})
            else:
                messages.append({"role": "user", "content": f"And {turn}?", "name": "user"})
            for i, message in enumerate(messages):  # other ids at every request
                if message["role"] == "tool":
                    messages[i] = {**message, "tool_call_id": f"call-{turn}-{i}"}
    calls = gateway.calls(gateway.claims[0])
    for earlier, later in pairwise(calls):
        assert extends(later, earlier)
    assert gateway.stats["branched"] == {"first_call": 1}


def test_an_edit_falls_back_to_the_last_common_turn(gateway: Running) -> None:
    asked = {"role": "user", "content": "Hello"}
    with client(gateway) as api:
        first = echo(converse(gateway, api, [asked], "One."))
        turn = [asked, first, {"role": "user", "content": "Two?"}]
        converse(gateway, api, turn, "Two.")
        edited = [*turn, {"role": "assistant", "content": "No!"}, {"role": "user", "content": "?"}]
        converse(gateway, api, edited, "Three.")
    calls = gateway.calls(gateway.claims[0])
    assert extends(calls[2], calls[0])
    assert not extends(calls[2], calls[1])
    assert calls[2].params["continued"]
    assert calls[2].params["branched"] == "history_edited"
    assert "branched" not in calls[1].params


def test_truncated_and_stopped_replies_continue(gateway: Running) -> None:
    """Without a stop token the template writes the turn's end; a stop string is not repeated."""
    asked: list[Any] = [{"role": "user", "content": "Hello"}]
    again = {"role": "user", "content": "Again"}
    ids = one_by_one(gateway.renderer, "One. STOP Two.")
    gateway.sampler.script = lambda *_: ids
    with client(gateway) as api:
        for more in ({"max_tokens": 4}, {"stop": "STOP"}, {"stop": "TOP"}):
            said = api.chat.completions.create(model="policy", messages=asked, **more)
            api.chat.completions.create(
                model="policy", messages=[*asked, echo(said.choices[0].message), again]
            )
    length, after_length, stop, after_stop, inside, after_inside = gateway.calls(gateway.claims[0])
    text = gateway.renderer.decode_raw
    assert extends(after_length, length)
    assert text(after_length.prompt_ids).endswith(
        "One.<|im_end|>\n<|im_start|>user\nAgain<|im_end|>\n<|im_start|>assistant\n"
    )
    for call, later, said in ((stop, after_stop, "One. "), (inside, after_inside, "One. S")):
        kept = len(call.prompt_ids) + len(said)
        assert later.prompt_ids[:kept] == (call.prompt_ids + call.response_ids)[:kept]
        assert f"assistant\n{said}<|im_end|>\n" in text(later.prompt_ids)
        assert not extends(later, call)
        assert later.params["branched"] == "reply_cut"


def test_each_choice_can_be_continued(gateway: Running) -> None:
    asked: list[Any] = [{"role": "user", "content": "Hello"}]
    with client(gateway) as api:
        made = api.chat.completions.create(model="policy", messages=asked, n=2)
        for choice in made.choices:
            more = [*asked, echo(choice.message), {"role": "user", "content": "?"}]
            api.chat.completions.create(model="policy", messages=more)
    first, second, after_first, after_second = gateway.calls(gateway.claims[0])
    assert extends(after_first, first)
    assert extends(after_second, second)


def test_a_template_that_rewrites_history_is_respected(tokenizer: Any) -> None:
    """Thinking of earlier turns is dropped by Qwen3's template: then the prompt is rendered."""
    renderer = with_template(
        tokenizer,
        "{%- for m in messages -%}<|im_start|>{{ m.role }}\n"
        "{%- if m.reasoning_content and loop.last -%}<think>{{ m.reasoning_content }}</think>"
        "{%- endif -%}{{ m.content }}<|im_end|>\n{% endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}",
    )
    asked: list[Any] = [{"role": "user", "content": "Hello"}]
    for reasoning, continued in ((None, True), ("Hm.", False)):
        known = Conversations()
        prompt = render_prompt(renderer, known, asked, None, None)
        reply = {"role": "assistant", "content": "Hi", "reasoning_content": reasoning}
        thought = f"<think>{reasoning}</think>" if reasoning else ""
        ids = renderer.encode(f"{thought}Hi<|im_end|>")
        remember_reply(renderer, known, prompt, reply, ids, "Hi", cut=False)
        for sent in (reply, {"role": "assistant", "content": "Hi"}):  # agents may drop thoughts
            more = [*asked, sent, {"role": "user", "content": "?"}]
            after = render_prompt(renderer, known, more, None, None)
            assert (after.continues is not None) == continued
            assert after.branched == (None if continued else Branch.THINKING_STRIPPED)
            assert after.ids == renderer.render(more)


def test_what_is_known_exactly_explains_before_what_is_alike(tokenizer: Any) -> None:
    """The same messages had no tools; with these tools, the reply had a thought."""
    source = template(content="{{ m.reasoning_content }}{{ m.content }}")
    renderer = with_template(tokenizer, "{{ 'tools' if tools }}" + source)
    known, asked = Conversations(), [{"role": "user", "content": "Hello"}]
    plain = {"role": "assistant", "content": "Hi"}
    for tools, reply in ((None, plain), (TOOLS, {**plain, "reasoning_content": "Greet."})):
        prompt = render_prompt(renderer, known, asked, tools, None)
        remember_reply(renderer, known, prompt, reply, [1], "Hi", cut=False)
    more = [*asked, plain, {"role": "user", "content": "?"}]
    assert render_prompt(renderer, known, more, TOOLS, None).branched is Branch.TOOLS_CHANGED


def test_turns_hold_their_tokens_once() -> None:
    turns = [Said(range(1000))]
    for turn in range(1, 500):
        turns.append(Said(range(1000 + 10 * turn), turns[-1]))
    assert turns[-1].ids() == [*range(1000 + 10 * 499)]
    assert turns[7].ids() == [*range(1070)]
    assert {len(turn._own) for turn in turns[1:]} == {10}  # pyright: ignore[reportPrivateUsage]


def test_memory_is_bounded() -> None:
    known = Conversations()
    keys = [ConversationKey(str(i).encode(), b"", None) for i in range(1000)]
    for key in keys:
        known.put(key, Said(range(10)))
    assert len(known) <= 256
    assert known.get(keys[999]) is not None
    assert known.of(keys[999].messages) == [keys[999]]
    assert known.get(keys[0]) is None
    known.put(ConversationKey(b"huge", b"", None), Said(range(3_000_000)))
    assert len(known) == 0
