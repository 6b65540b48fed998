"""Show texts that agents wrote: they are hostile until shown otherwise.

Control characters become visible or go, Markdown makes no HTML of the text's own and links to
http and https only, and long texts are cut.
"""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markupsafe import Markup

MOST = 20_000
"""Characters of one text that a page shows."""
_MOST_MARKDOWN = 8_000  # of more, hostile Markdown could keep a page waiting for seconds
_COLORS = re.compile(r"\x1b(?:\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
# Overrides of the writing direction let a text look like another one; surrogates are no text.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_TAGS = {
    "<pre>": '<pre tabindex="0">',  # by keyboard, only what has the focus scrolls
    "<table>": '<div class="wide" tabindex="0"><table>',
    "</table>": "</table></div>",
    "<h[1-6]>": "<p><strong>",  # headings of the page are its own
    "</h[1-6]>": "</strong></p>",
    '(?<=<t[hd]) style="[^"]*"': "",  # alignment of table cells, which the policy forbids
}


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
    shown = _markdown.render(plain(text))
    for tag, instead in _TAGS.items():  # the text's own markup is escaped
        shown = re.sub(tag, instead, shown)
    return Markup(shown)


def _is_of_the_web(url: str) -> bool:
    return re.match("https?://", url, re.IGNORECASE) is not None


_markdown = MarkdownIt("commonmark", {"html": False, "breaks": True, "maxNesting": 20})
_markdown.enable(["table", "strikethrough"]).disable("image")
_markdown.validateLink = _is_of_the_web
