"""Hostile texts as pages show them."""

from __future__ import annotations

import time

from ui_pages import HOSTILE

from agentrl.ui.texts import MOST, markdown, plain


def test_markdown_makes_no_html_of_the_text_and_links_to_the_web_only() -> None:
    shown = markdown(f"# Title\n{HOSTILE}\n|a|\n|:-|\n|b|\n\n[web](https://example.org)")
    for forbidden in ("<script", "<svg", "<img", "<style", "<h1", " style=", 'href="java'):
        assert forbidden not in shown
    for kept in ("&lt;script&gt;", '<a href="https://example.org">web</a>', "<td>b</td>",
                 "<strong>Title</strong>"):  # fmt: skip
        assert kept in shown


def test_a_links_title_does_not_open_the_message() -> None:
    text = '[x](http://evil.example "b style=")\n\n|a|b|\n|:-|-|\n|c|d|\n\n' * 2
    shown = markdown(text)
    assert shown.count("<div") == shown.count("</div>") == 2
    assert shown.count("<a ") == shown.count("</a>") == 2
    assert "text-align" not in shown


def test_control_characters_are_dropped_or_visible_and_long_texts_take_no_time() -> None:
    assert plain("\x1b[1;31mred\x1b[0m\x07\x00 \x1b]0;title\x07x\r\ny") == "red␇␀ x\ny"
    assert plain("a\u202eb\ud800c") == "a\ufffdb\ufffdc"
    began = time.perf_counter()
    assert len(markdown("[" * 10_000_000)) == MOST + len('<pre tabindex="0"></pre>')
    assert len(markdown("[" * 8_000)) > 8_000
    assert time.perf_counter() - began < 5
