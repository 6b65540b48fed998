"""One self-contained HTML file about a run, to share: made of what the pages show.

The pages are asked in this process, and the elements that matter are copied: without links into
the pages, forms and parts that are fetched on demand. Styles and the scripts that draw charts are
written into the file; its policy allows these scripts only, by their hashes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from markupsafe import Markup

from agentrl.config.setting_names import flattened
from agentrl.history.sources import OpenRun, Sources
from agentrl.ui.app import create_app
from agentrl.ui.views import STATIC, render
from agentrl_tracer.schemas import Purpose

_SCRIPTS = ("echarts.min.js", "charts.js")
_NOT_SHARED = ("run.store", "run.folder", "models", "sampler.vllm.url", "gateway.", "tinker.")
"""Settings whose values may hold passwords, parameters of providers, or addresses."""
_DROPPED_TAGS, _DROPPED_CLASSES = {"form", "nav", "button"}, {"tabs", "on-demand", "tokens"}
_VOID = {"input", "img", "br", "hr", "meta", "link", "wbr", "col"}
_EXAMPLES = 6

Wanted = Callable[[str, dict[str, str]], bool]


def run_report(folder: Path) -> str:
    """Return the text of an HTML file about the run in a folder.

    Raises:
        ConfigError: this is no run folder.
    """
    with contextlib.closing(Sources(folder.absolute().parent)) as sources:
        run = sources.open(folder.absolute().name)
        while run.fill():
            pass
        return asyncio.run(_report(run, folder.absolute().parent))


async def _report(run: OpenRun, root: Path) -> str:
    app = create_app(root)
    base, styles = f"/runs/{quote(run.name)}", dict[str, None]()
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://report"
    ) as client:

        async def copied(path: str, wanted: Wanted, lower: int) -> Markup:
            """Return the wanted elements of a page, their headings so many levels lower."""
            answer = await client.get(path)
            if answer.status_code != 200:
                return Markup("")
            parser = _Copier(wanted, lower)
            parser.feed(answer.text)
            styles.update(dict.fromkeys(parser.styles))
            return Markup("".join(parser.copied))

        figures = await copied(base, lambda tag, has: has.get("id") == "figures", 0)
        evaluations = await copied(f"{base}/evaluations", lambda tag, has: tag == "main", 1)
        is_call: Wanted = lambda tag, has: tag == "section" and has.get("class") == "call"  # noqa: E731
        examples = [
            (row, await copied(f"{base}/rollouts/{row['id']}", is_call, 1))
            for row in _examples(run)
        ]
    app.state.sources.close()
    scripts = [
        (STATIC / name).read_text(encoding="utf-8").replace("</script", r"<\/script")
        for name in _SCRIPTS
    ]
    return render(
        "report.html", run=run.current(), figures=figures, evaluations=evaluations,
        examples=examples, settings=_shared(run.folder.read_config()),
        styles=[Markup((STATIC / name).read_text()) for name in styles],
        scripts=[Markup(script) for script in scripts], hashes=[_hash(one) for one in scripts],
    )  # fmt: skip


def _shared(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in flattened(config).items()
        if not name.startswith(_NOT_SHARED) and value is not None
    }


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _examples(run: OpenRun) -> list[dict[str, Any]]:
    """Return rollouts of the same tasks before and after: of tasks whose reward changed, first."""
    with run.index.read() as db:
        for purpose in (Purpose.EVAL, Purpose.TRAIN):
            [first, last] = db.execute(
                "SELECT min(step), max(step) FROM rollout WHERE purpose = ?", [purpose]
            ).fetchone()
            pairs = db.execute(
                'SELECT a.id, b.id FROM rollout a JOIN rollout b ON a.task = b.task AND b."index" '
                '= a."index" AND b.purpose = a.purpose AND b.step = ? WHERE a.purpose = ? '
                'AND a.step = ? AND a."index" = 0 ORDER BY a.reward IS b.reward, b.reward, a.task '
                "LIMIT ?",
                [last, purpose, first, _EXAMPLES // 2],
            ).fetchall()
            if pairs and first != last:
                ids = [id for pair in pairs for id in pair]
                one = "SELECT * FROM rollout WHERE id = ?"
                return [dict(db.execute(one, [id]).fetchone()) for id in ids]
    return []


class _Copier(HTMLParser):
    """Copies the elements for which ``wanted`` is true, and names the styles of the page."""

    def __init__(self, wanted: Wanted, lower: int) -> None:
        super().__init__(convert_charrefs=False)
        self.copied: list[str] = []
        self.styles: list[str] = []
        self._wanted, self._lower = wanted, lower
        self._open: list[tuple[str, str, bool, bool]] = []
        """Of each open element: its tag, the tag it is copied as, whether it is copied, whether
        it holds data of a chart."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        if tag == "link" and has.get("rel") == "stylesheet":
            self.styles.append(has["href"].removeprefix("/static/"))
        classes = set(has.get("class", "").split())
        within = bool(self._open) and self._open[-1][2]
        kept = within or (self._wanted(tag, has) and not any(one[2] for one in self._open))
        if tag in _DROPPED_TAGS or classes & _DROPPED_CLASSES:
            kept = False
        shown = self._shown_as(tag, has)
        if kept:
            self.copied.append(f"<{shown}{''.join(_attributes(has, shown))}>")
        if tag not in _VOID:
            is_data = tag == "script" and has.get("type") == "application/json"
            self._open.append((tag, shown, kept, is_data))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._open and self._open[-1][2]:
            self.copied.append(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            opened, shown, kept, _ = self._open.pop()
            if kept:
                self.copied.append(f"</{shown}>")
            if opened == tag:
                return

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][2]:
            self.copied.append(_without_links(data) if self._open[-1][3] else data)

    def handle_entityref(self, name: str) -> None:
        self.handle_data(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self.handle_data(f"&#{name};")

    def _shown_as(self, tag: str, has: dict[str, str]) -> str:
        if tag == "a" and not has.get("href", "").startswith("#"):
            return "span"
        if tag == "main":
            return "div"
        is_heading = len(tag) == 2 and tag[0] == "h" and tag[1].isdigit()
        return f"h{min(int(tag[1]) + self._lower, 6)}" if is_heading else tag


def _attributes(has: dict[str, str], shown: str) -> Iterator[str]:
    dropped = {"href", "rel", "download", "target"} if shown == "span" else set()
    for name, value in has.items():
        if name not in dropped and not name.startswith(("hx-", "sse-")):
            yield f' {name}="{escape(value)}"'


def _without_links(data: str) -> str:
    """Return a chart's data without the pages that its points lead to."""

    def stripped(value: Any) -> Any:
        if isinstance(value, list):
            return [stripped(one) for one in value]
        if isinstance(value, dict):
            kept = {name: stripped(one) for name, one in value.items() if name != "href"}
            return kept | ({"hrefs": []} if "hrefs" in kept else {})
        return value

    return json.dumps(stripped(json.loads(data))).replace("<", "\\u003c")
