"""OpenAI's and ShareGPT's forms are the same chats; what does not fit is named by its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_data import TOOL, as_sharegpt, asked, clerk, game

from agentrl.datasets.chats import to_chat


def test_both_forms_are_the_same_chat() -> None:
    openai, sharegpt = to_chat(clerk(7)), to_chat(as_sharegpt(7))
    assert sharegpt.messages[1].pop("content") == ""
    assert sharegpt == openai
    assert openai.tools == [TOOL]


def test_a_table_may_hold_json_as_text_and_the_fields_of_all_messages() -> None:
    known = clerk(7)
    assert to_chat({name: json.dumps(value) for name, value in known.items()}) == to_chat(known)
    names = {name for message in known["messages"] for name in message} | {"weight"}
    padded = [{name: one.get(name) for name in names} for one in known["messages"]]
    assert to_chat({**known, "messages": padded}) == to_chat(known)
    arguments = padded[1]["tool_calls"][0]["function"]
    arguments["arguments"] = json.loads(arguments["arguments"])  # as a dataset's column
    assert json.loads(to_chat({"messages": padded}).messages[1]["tool_calls"][0]["function"][
        "arguments"
    ]) == {"item": 7}  # fmt: skip


def test_a_prompt_with_its_completion_is_a_chat() -> None:
    assert to_chat({"prompt": asked(7)["content"], "completion": "I am 7."}) == to_chat(game(7))
    known = game(7)["messages"]
    assert to_chat({"prompt": known[:1], "completion": known[1:]}) == to_chat(game(7))


def test_a_system_prompt_beside_the_messages_comes_first() -> None:
    known = game(7)["messages"]
    system = {"role": "system", "content": "Be kind."}
    for data in (
        {"messages": known},
        {"conversations": known},
        {"prompt": known[0]["content"], "completion": known[1:]},
    ):
        assert to_chat({**data, "system": "Be kind."}).messages == [system, *known]
    assert to_chat({"messages": [system, *known], "system": "No."}).messages == [system, *known]


def test_a_completion_may_be_a_number_as_csv_has_it() -> None:
    assert to_chat({"prompt": "What is 6*7?", "completion": 42}).messages[1]["content"] == "42"


def test_weights_are_those_of_openai() -> None:
    assert to_chat(game(7)).weights == [None, None]
    assert to_chat(game(7, weight=0)).weights == [None, 0.0]
    assert to_chat(game(7, weight=0.5)).weights == [None, 0.5]
    turn = {"from": "gpt", "value": "I am 7.", "weight": 0}
    shared = {"system": "Play.", "conversations": [{"from": "human", "value": "?"}, turn]}
    assert to_chat(shared).weights == [None, None, 0.0]
    assert "weight" not in to_chat(game(7, weight=1)).messages[1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"text": "x"}, "there are no messages .* it has text"),
        ({"messages": "[1"}, "messages: is text, but no JSON"),
        ({"messages": {"role": "user"}}, "messages: give a list, not dict"),
        ({"messages": ["hello"]}, r"messages\[0\]: give an object"),
        ({"messages": []}, "messages"),
        ({"messages": [asked(1)]}, "messages: there is no answer"),
        ({"messages": [asked(1), {"role": "bot", "content": "x"}]}, r"messages\[1\]\.role"),
        ({"messages": [{"role": "user"}, {"role": "assistant"}]}, r"messages\[0\].*content"),
        (game(1, weight="x"), r"messages\[1\]\.weight: give a number of 0 or more, not 'x'"),
        ({"messages": [{**asked(1), "weight": 1}]}, r"messages\[0\]\.weight: only answers"),
        (game(1, function_call={}), r"messages\[1\]\.function_call: give tool_calls"),
        (game(1, tool_calls=[{"id": "x"}]), r"messages\[1\]\.tool_calls\[0\].*function"),
        ({**game(1), "tools": [{"type": "function"}]}, r"tools\[0\].*function"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, r"conversations\[0\]\.from: 'bot'"),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\]: give an object with from"),
        (
            {"conversations": [{"from": "function_call", "value": "price"}]},
            r"conversations\[0\]\.value: is text, but no JSON",
        ),
    ],
)
def test_what_does_not_fit_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_chat(data)
