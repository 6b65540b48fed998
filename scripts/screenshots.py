"""Make the pictures of docs/window.md and README.md from a finished run.

    python scripts/screenshots.py [RUNS] [--run NAME] [--out docs/window]

Needs Debian's chromium (``apt-get install chromium``) and playwright, of the development
environment. The task of the pictures stayed wrong from the first evaluation to the
second.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
from ui_browser import Tab, open_browser, open_tab, serve_pages  # noqa: E402
from ui_pages import fill_indexes  # noqa: E402

from agentrl.history.sources import Sources  # noqa: E402

HEIGHT, MOST_BYTES = 800, 150_000


def places(root: Path, name: str) -> dict[str, str]:
    """Return the path of each picture's page."""
    base = f"/runs/{name}"
    with contextlib.closing(Sources(root)) as sources, sources.open(name).index.read() as db:
        evaluations = (
            "SELECT DISTINCT step FROM rollout WHERE purpose = 'eval' ORDER BY step LIMIT 2"
        )
        [before], [after] = db.execute(evaluations)
        task, rollout = db.execute(
            "SELECT b.task, b.id FROM rollout a JOIN rollout b ON a.task = b.task "
            "WHERE a.purpose = 'eval' AND b.purpose = 'eval' AND a.step = ? AND b.step = ? "
            "ORDER BY a.reward + b.reward, b.task = 19 DESC LIMIT 1",
            [before, after],
        ).fetchone()
        [group] = db.execute(
            'SELECT "group" FROM rollout WHERE purpose = \'train\' GROUP BY "group" '
            "ORDER BY max(reward) > min(reward) DESC, step DESC LIMIT 1"
        ).fetchone()
    return {
        "runs": "/",
        "group": f"{base}/groups/{group}",
        "run": base,
        "rollouts": f"{base}/rollouts?where=reward>0&sort=-tokens",
        "evaluations": f"{base}/evaluations?before={before}&after={after}",
        "task": f"{base}/tasks/eval/{task}",
        "rollout": f"{base}/rollouts/{rollout}",
    }


def take(tab: Tab, out: Path, name: str, path: str) -> None:
    answer = tab.page.goto(tab.origin + path, wait_until="load")
    if answer.status != 200:
        print(f"{name}: no page {path}")
        return
    while tab.page.get_by_text("vocabulary is loading").count():
        tab.page.wait_for_timeout(1000)
        tab.page.reload()
    tab.page.wait_for_timeout(700)  # charts are drawn in the next frames
    file = out / f"{name}.png"
    tab.page.screenshot(path=str(file))
    size = file.stat().st_size
    print(f"{file} {size // 1000} kB{', too large' if size > MOST_BYTES else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs"))
    parser.add_argument("--run", default="hello-real")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "window")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    fill_indexes(asked.runs)
    paths = places(asked.runs, asked.run)
    with serve_pages(asked.runs) as link, open_browser() as browser:
        with open_tab(browser, link, height=HEIGHT) as tab:
            for name, path in paths.items():
                take(tab, asked.out, name, path)
        with open_tab(browser, link, width=390, height=HEIGHT, scheme="dark") as tab:
            take(tab, asked.out, "narrow", paths["run"])


if __name__ == "__main__":
    main()
