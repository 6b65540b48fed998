"""Tool calls and reasoning as the model families write them, rendered, parsed and streamed."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
from family_templates import FAMILIES, Family, published
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_proxy.rendering import templates as families
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.rendering.reply import ParsedReply
from agentrl_proxy.rendering.structured_output import reads_calls
from agentrl_proxy.rendering.tool_call_parser import ReplyParser

ARGUMENTS = '{"q":  "köln <b>",   "n": 1.50, "deep": {"a": [1, {"b": "}"}]}}'
USER: list[dict[str, Any]] = [{"role": "user", "content": "Where is Köln?"}]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
HERMES = FAMILIES["qwen2.5"]


@pytest.fixture(scope="module")
def speakers(tokenizer: Any) -> dict[str, Renderer]:
    return {name: Renderer(one.tokenizer(tokenizer)) for name, one in FAMILIES.items()}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def speaker(family: str, speakers: dict[str, Renderer]) -> Renderer:
    """The family's renderer."""
    return speakers[family]


@pytest.fixture
def hermes(speakers: dict[str, Renderer]) -> Renderer:
    return speakers["qwen2.5"]


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def called(name: str, arguments: Any, content: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def in_pieces(parser: ReplyParser, pieces: list[str]) -> tuple[ParsedReply, ParsedReply]:
    """The whole reply, and what a client adds up from what it was shown."""
    shown = ParsedReply()

    def take(piece: ParsedReply) -> None:
        shown.content += piece.content
        shown.reasoning += piece.reasoning
        assert not piece.tool_calls or piece.first_call == len(shown.tool_calls)
        shown.tool_calls += piece.tool_calls

    for piece in pieces:
        take(parser.feed(piece))
    whole = parser.finish()
    take(parser.remainder(whole))
    assert [call.as_dict() for call in shown.tool_calls] == [
        call.as_dict() for call in whole.tool_calls
    ]
    assert (shown.content, shown.reasoning) == (whole.content, whole.reasoning)
    return whole, shown


def test_the_chat_template_names_the_family(family: str, speaker: Renderer) -> None:
    found = families.response_template(speaker.tokenizer.chat_template)
    one_of = {"llama3": families.LLAMA_3, "deepseek-v3.1": families.DEEPSEEK_3_1}
    one_of |= dict.fromkeys(("deepseek-v3", "deepseek-r1"), families.DEEPSEEK_3)
    assert found is one_of.get(family, families.QWEN)


@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_calls(family: str, speaker: Renderer, size: int) -> None:
    """Said, cut into pieces, read: names, exact arguments, no rest."""
    made = FAMILIES[family]
    calls = [("search", ARGUMENTS), ("look_up", "{}")][: 2 if made.parallel else 1]
    text = made.said(*calls)
    before = "" if family == "llama3" else "Let me look."
    thought = "well\n</think>\n\n" if family == "deepseek-r1" else ""
    text = thought + before + text
    # Through token ids, as special tokens of the format must not be lost on the way.
    text = speaker.decode(speaker.encode(text + made.eos))
    whole, _ = in_pieces(speaker.parser(tools=True), cut(text, size))
    assert [(call.name, call.arguments) for call in whole.tool_calls] == calls
    assert whole.content == before
    assert whole.reasoning == ("well" if family == "deepseek-r1" else "")


def test_a_rendered_call_is_what_the_model_would_say(family: str, speaker: Renderer) -> None:
    """The template's own writing of a call parses to the same call."""
    arguments = {"q": "köln", "n": [1, None, {"x": True}]}
    asked = speaker.text(speaker.normalize(USER), TOOLS)
    told = speaker.text(
        speaker.normalize([*USER, called("search", arguments)]), TOOLS, generate=False
    )
    if family == "deepseek-r1":  # it drops its own opening of a thought
        asked = asked.removesuffix("<think>\n")
    if family == "qwen3":
        told = told.replace("<think>\n\n</think>\n\n", "")
    assert told.startswith(asked.rstrip("\n"))
    said = told[len(asked.rstrip("\n")) :].lstrip("\n").removesuffix(speaker.turn_end)
    parser = speaker.parser(tools=True, opening="" if family == "deepseek-r1" else None)
    whole, _ = in_pieces(parser, list(said))
    assert [call.name for call in whole.tool_calls] == ["search"]
    assert json.loads(whole.tool_calls[0].arguments) == arguments
    assert whole.content == ""


def test_a_call_is_shown_when_it_is_complete(family: str, speaker: Renderer) -> None:
    """Before the rest of the reply, where the family closes calls."""
    text = FAMILIES[family].said(("search", ARGUMENTS))
    parser = speaker.parser(tools=True, opening="" if family == "deepseek-r1" else None)
    seen = [(i, call) for i, c in enumerate(text) for call in parser.feed(c).tool_calls]
    seen += [(len(text), call) for call in parser.remainder(parser.finish()).tool_calls]
    [(at, call)] = seen
    assert (call.name, call.arguments) == ("search", ARGUMENTS)
    assert at >= text.index(ARGUMENTS) + len(ARGUMENTS)
    assert (at < len(text)) == (family != "llama3")


BROKEN = ['{"q": ', '{"q": "x",}', "{q: 1}", "[1]", '{"q": NaN}', '{"q": 1} {}', ""]


@pytest.mark.parametrize("arguments", BROKEN)
def test_malformed_calls_are_text(family: str, speaker: Renderer, arguments: str) -> None:
    made = FAMILIES[family]
    text = made.said(("search", arguments))
    for pieces in ([text], list(text)):
        parser = speaker.parser(tools=True, opening="" if family == "deepseek-r1" else None)
        whole, shown = in_pieces(parser, pieces)
        assert whole == ParsedReply(content=text)
        assert shown.content == text


@pytest.mark.parametrize("family", ["qwen2.5", "deepseek-v3"])
def test_calls_before_a_malformed_one_stay(family: str, speaker: Renderer) -> None:
    made = FAMILIES[family]
    good = made.said(("search", ARGUMENTS)).removesuffix("<｜tool▁calls▁end｜>")
    rest = made.said(("search", "{'x': 1}"), ("search", "{}")).removeprefix(
        "<｜tool▁calls▁begin｜>"
    )
    for size in (1, 7, 10_000):
        text = f"So:\n{good}\n{rest}"
        whole, _ = in_pieces(speaker.parser(tools=True), cut(text, size))
        assert [call.arguments for call in whole.tool_calls] == [ARGUMENTS]
        assert whole.content == f"So:\n{rest}"


def test_an_answer_in_json_is_no_call_without_arguments(speakers: dict[str, Renderer]) -> None:
    """Llama writes no delimiters around a call."""
    text = '{"name": "Alice", "age": 30}'
    for size in (1, 7, 10_000):
        whole, _ = in_pieces(speakers["llama3"].parser(tools=True), cut(text, size))
        assert whole == ParsedReply(content=text)


@pytest.mark.parametrize("family", FAMILIES.values())
def test_calls_are_known_to_be_read(tokenizer: Any, family: Family) -> None:
    assert reads_calls(Renderer(family.tokenizer(tokenizer)))


@pytest.mark.parametrize("name", ["qwen3_5_think", "muse_glimmer", "lfm2"])
def test_which_calls_are_read_is_known(tokenizer: Any, name: str) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = published(name)
    assert reads_calls(Renderer(other)) == (name == "qwen3_5_think")


def test_no_blank_line_follows_an_empty_thought(hermes: Renderer) -> None:
    text = "<think>\n\n</think>\n\nHi."
    for pieces in ([text], list(text)):
        whole, _ = in_pieces(hermes.parser(tools=True), pieces)
        assert whole == ParsedReply(content="Hi.")


def test_whitespace_of_an_argument_between_tags_is_kept(tokenizer: Any) -> None:
    qwen = copy.deepcopy(tokenizer)
    qwen.chat_template = published("qwen3_5_nothink")
    renderer, asked = Renderer(qwen), {"old": "    x = 1\n", "new": "\n    y = 3\n\n"}
    strings = {"type": "object", "properties": {name: {"type": "string"} for name in asked}}
    tools = [{"type": "function", "function": {"name": "edit", "parameters": strings}}]
    turns = renderer.normalize([*USER, called("edit", asked)])
    written = renderer.text(turns, tools, generate=False).rpartition("<|im_start|>assistant\n")[2]
    [call] = renderer.parser(tools=tools).finish(written.partition("<|im_end|>")[0]).tool_calls
    assert json.loads(call.arguments) == asked


def test_calls_in_thoughts_are_thoughts(hermes: Renderer) -> None:
    call, broken = HERMES.said(("search", "{}")), HERMES.said(("search", "{"))
    for size in (1, 5, 10_000):
        text = f"<think>k{call}</think>\n\nok\n{call}\n{broken}"
        whole, _ = in_pieces(hermes.parser(tools=True), cut(text, size))
        assert whole.reasoning == f"k{call}"
        assert len(whole.tool_calls) == 1
        assert whole.content == f"ok\n{broken}"


@pytest.mark.parametrize(
    ("json_text", "arguments"),
    [
        (r'{"name": "f", "arguments": "{\"q\": 1}"}', '{"q": 1}'),
        ('{"arguments": {"q": 1}, "id": {"name": 2}, "name": "f"}', '{"q": 1}'),
        ('{"name": "f"}', "{}"),
        (' {"name":"f","parameters":{ "q":1 } , "x": [{"arguments": {}}]}\n', '{ "q":1 }'),
        (r'{"na\u006de": "\u0066", "arguments": {"\"}": "\\"}}', r'{"\"}": "\\"}'),
        # no calls
        ('{"name": "f", "arguments": {}, "name": "g"}', None),
        ('{"name": "f", "arguments": {}, "parameters": {}}', None),
        ('{"name": 3, "arguments": {}}', None),
        ('{"name": "", "arguments": {}}', None),
        ('{"name": "f", "arguments": {}} {}', None),
        ('{"name": "f", "arguments": "x"}', None),
        ("[" * 100_000, None),
        (r'{"name": "\ud83d", "arguments": {}}', None),
    ],
    ids=range(13),
)
def test_unusual_json(hermes: Renderer, json_text: str, arguments: str | None) -> None:
    text = f"<tool_call>{json_text}</tool_call>"
    for pieces in ([text], cut(text, 1 + len(text) // 200)):
        whole, _ = in_pieces(hermes.parser(tools=True), pieces)
        if arguments is None:
            assert whole == ParsedReply(content=text)
        else:
            assert [(c.name, c.arguments) for c in whole.tool_calls] == [("f", arguments)]


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
_marks = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "\n", " ", "{", "}", '"', "<", ",",
    '{"name": "f", "arguments": ', '{"name": "f", "parameters": ', "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "\n```<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "word",
]  # fmt: skip


@st.composite
def replies(draw: st.DrawFn, made: Family) -> str:
    """Replies that are well-formed, nearly so, and not at all."""
    parts = list[str]()
    for kind in draw(st.lists(st.sampled_from("tcccm"), max_size=6)):
        if kind == "c":
            spelled = json.dumps(
                draw(st.dictionaries(st.text(max_size=5), _values, max_size=3)),
                ensure_ascii=draw(st.booleans()),
                indent=draw(st.sampled_from([None, 1])),
            )
            parts.append(made.said(("f", spelled)))
        else:
            parts.append(draw(st.text(max_size=8) if kind == "t" else st.sampled_from(_marks)))
    text = "".join(parts)
    if draw(st.integers(0, 3)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    return text.encode("utf-8", "replace").decode()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from([*FAMILIES]))
def test_any_chunking_gives_the_same_message(
    speakers: dict[str, Renderer], data: st.DataObject, name: str
) -> None:
    """And what was shown adds up to it: see in_pieces."""
    speaker = speakers[name]
    text = data.draw(replies(FAMILIES[name]))
    tools = data.draw(st.booleans())
    whole, _ = in_pieces(speaker.parser(tools=tools), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    for chunks in (pieces, list(text)):
        parser = speaker.parser(tools=tools)
        again, _ = in_pieces(parser, chunks)
        assert again == whole


def test_untyped_arguments_are_cast_by_the_tools_schemas(tokenizer: Any) -> None:
    """Qwen 3.5's notation has no types; it is held back to its end."""
    made = HERMES.tokenizer(tokenizer)
    made.response_template = families.QWEN_3_5
    speaker = Renderer(made)
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = (
        "Hm.\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=q>\nx\n"
        "</parameter>\n</function>\n</tool_call>"
    )
    for pieces in ([text], list(text)):
        whole, shown = in_pieces(speaker.parser(tools=tools), pieces)
        assert [(c.name, json.loads(c.arguments)) for c in whole.tool_calls] == [
            ("f", {"n": 3, "q": "x"})
        ]
        assert shown.content == "Hm."
