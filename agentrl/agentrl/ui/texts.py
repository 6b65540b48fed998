"""Show texts that agents wrote: they are hostile until shown otherwise.

Control characters become visible or go, Markdown makes no HTML of the text's own and links to
http and https only, and long texts are cut.
"""

from __future__ import annotations

import re
from typing import Any

from markdown_it import MarkdownIt
from markupsafe import Markup

MOST = 20_000
"""Characters of one text that a page shows."""
_MOST_MARKDOWN = 8_000  # of more, hostile Markdown could keep a page waiting for seconds
_COLORS = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
# Overrides of the writing direction let a text look like another one; surrogates are no text.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str, most: int = MOST) -> str:
    """Return the text's first ``most`` characters, without terminal colors, controls visible."""
    return _UNSEEN.sub(_visible, _COLORS.sub("", text[:most].replace("\r\n", "\n")))


def _visible(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\N{REPLACEMENT CHARACTER}"


def markdown(text: str) -> Markup:
    """Render Markdown: images as links to them, headings as bold lines. Long texts stay text."""
    if len(text) > _MOST_MARKDOWN:
        return Markup('<pre tabindex="0">{}</pre>').format(plain(text))
    # By keyboard, only what has the focus scrolls. The text's own markup is escaped.
    return Markup(_markdown.render(plain(text)).replace("<pre>", '<pre tabindex="0">'))


def _make() -> MarkdownIt:
    made = MarkdownIt("commonmark", {"html": False, "breaks": True, "maxNesting": 20})
    made.enable(["table", "strikethrough"]).disable("image")
    made.validateLink = lambda url: bool(re.match(r"https?://", url, re.IGNORECASE))
    # Headings of the page are its own.
    made.add_render_rule("heading_open", lambda *_: "<p><strong>")
    made.add_render_rule("heading_close", lambda *_: "</strong></p>\n")
    made.add_render_rule("table_open", lambda *_: '<div class="wide" tabindex="0"><table>')
    made.add_render_rule("table_close", lambda *_: "</table></div>\n")
    made.core.ruler.push("no_styles", _without_styles)
    return made


def _without_styles(state: Any) -> None:
    """Drop style attributes, which table cells have for their alignment."""
    for token in state.tokens:
        token.attrs.pop("style", None)


_markdown = _make()
