"""What every page uses: its templates, the run that its path names, its form."""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, unquote

from fastapi import Depends, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse

from agentrl import __version__
from agentrl.config.setting_names import recorded
from agentrl.history.rollout.conversation import answer_text
from agentrl.history.rollout.trace import verdict_of
from agentrl.history.sources import OpenRun, Sources
from agentrl.runs.excerpts import counted
from agentrl.ui.charts import Chart
from agentrl.ui.texts import MOST, markdown, plain
from agentrl_tracer.schemas import Feedback

_HERE = Path(__file__).parent
STATIC = _HERE / "static"
_LARGEST_FORM = 100_000
AUTHOR_COOKIE = "agentrl-author"


def when(seconds: float | None) -> str:
    """Return a moment in local time, to the minute."""
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def duration(seconds: float | None) -> str:
    """Return a length of time in its two largest units: ``1 h 4 min``, ``12.3 s``."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def number(value: float | None, form: str = ",.4g") -> str:
    """Return a number, or a dash for none; counts with separators."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else format(value, form)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %".replace(".0 %", " %")


def figures(chart: Chart) -> Markup:
    """Return the rows of a chart's table.

    A run's page has 10,000 cells, for which macros take a tenth of a second.
    """
    form, href = percent if chart["unit"] == "%" else number, chart.get("href", "")
    rows = (
        _cell(first, number, href.replace("{x}", str(first)))
        + "".join(_cell(value, form) for value in values)
        for first, *values in chart["rows"]
    )
    return Markup("\n".join(f"<tr>{row}</tr>" for row in rows))


def _cell(value: Any, form: Callable[[Any], str], href: str = "") -> str:
    if isinstance(value, Mapping):
        value, href = value["text"], value["href"]
    text = escape(value) if isinstance(value, str) else form(value)
    return f'<td><a href="{escape(href)}">{text}</a></td>' if href else f"<td>{text}</td>"


def without_links(html: str) -> Markup:
    """Return parts of pages without their links to other pages, for a file to share."""
    text = re.sub(r'<a [^>]*href="/[^>]*>(.*?)</a>', r"<span>\1</span>", html, flags=re.DOTALL)
    return Markup(re.sub(r'"href": "/[^"]*"', '"href": ""', text))  # of the charts


_templates = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=True,  # agents' output is hostile
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters |= {
    "when": when,
    "duration": duration,
    "number": number,
    "counted": counted,
    "percent": percent,
    "plain": plain,
    "figures": figures,
    "without_links": without_links,
    "verdict": verdict_of,
    "answer": answer_text,
    "markdown": markdown,
    "recorded": recorded,
    "json": lambda value: json.dumps(value, ensure_ascii=False, indent=2),
}
_templates.globals |= {"version": __version__, "MOST": MOST}


def page(request: Request, template: str, /, status: int = 200, **values: Any) -> HTMLResponse:
    """Render a template; ``here`` is the path and query of the page."""
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    text = render(template, request=request, here=here, **values)
    return HTMLResponse(text.encode(errors="replace"), status)  # agents send lone surrogates


def render(template: str, /, **values: Any) -> str:
    return _templates.get_template(template).render(**values)


def render_alone(
    template: str, /, styles: Sequence[str], scripts: Sequence[str], **values: Any
) -> str:
    """Render a file that needs nothing else: static files are written into it.

    Its policy allows these scripts only, by their hashes.
    """
    texts = [(STATIC / name).read_text(encoding="utf-8") for name in scripts]
    texts = [text.replace("</script", r"<\/script") for text in texts]
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in texts]
    return render(
        template, hashes=hashes, scripts=[Markup(text) for text in texts],
        styles=[Markup((STATIC / name).read_text(encoding="utf-8")) for name in styles], **values,
    )  # fmt: skip


async def _form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form, without space around them."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST_FORM:
            raise HTTPException(413, f"the form has more than {_LARGEST_FORM:,} bytes")
    given = parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True)
    return {name: value.strip() for name, value in given}


Form = Annotated[dict[str, str], Depends(_form_of)]
"""What a request's form sends."""


def sources(request: Request) -> Sources:
    return request.app.state.sources


def run_of(request: Request, name: str) -> OpenRun:
    """Return the run that a path names, and have its index filled from now on.

    ``request.state.seen`` is the version that a page shows, at the least: it is told of later ones.
    """
    run = sources(request).open(name)
    request.state.seen = request.app.state.watcher.look_at(run).version
    return run


def source_of(request: Request, name: str) -> OpenRun:
    """Return the run, or on pages below /served the store, that a path names."""
    if not request.url.path.startswith("/served/"):
        return run_of(request, name)
    return sources(request).served(name)


def _feedback_on(request: Request, rollout_id: str | None, call_id: str | None) -> list[Feedback]:
    source = source_of(request, request.path_params["name"])
    rollouts = [rollout_id] if rollout_id and not call_id else None
    return source.store.feedback(source.id, rollout_ids=rollouts, call_id=call_id)


def _author_of(request: Request) -> str:
    return unquote(request.cookies.get(AUTHOR_COOKIE, ""))


_templates.globals |= {"feedback_on": _feedback_on, "author_of": _author_of}
