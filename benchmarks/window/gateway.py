"""How much a running gateway notices of ten live pages.

    python benchmarks/window/gateway.py [--seconds 20]

The gateway of ``benchmarks/gateway`` answers from an instant sampler and records every call. It is
asked by as many connections as give about half of its most requests a second. Ten pages of its
run follow it as browsers do: each hears of a change and asks for the page again. Pairs with and
without the pages alternate. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "gateway")]
import run as gateways  # noqa: E402
from reporting import machine, table, write_json  # noqa: E402

PAGES, PAIRS, MOST = 10, 5, 32
_THROTTLE_S = 2.0  # as the page asks again


def follow(host: str, cookie: str, ended: threading.Event, loads: list[float]) -> None:
    """Do as a browser does with one page: wait for a change, then load the page."""
    live, pages = (http.client.HTTPConnection(host, timeout=60) for _ in range(2))
    live.request("GET", "/runs/live/live", headers={"cookie": cookie})
    events, last = live.getresponse(), 0.0
    while not ended.is_set() and (line := events.readline()):
        if line.startswith(b"data:") and time.monotonic() - last > _THROTTLE_S:
            last = time.monotonic()
            pages.request("GET", "/runs/live", headers={"cookie": cookie})
            answer = pages.getresponse()
            answer.read()
            if answer.status == 200:
                loads.append(time.monotonic() - last)
    live.close()
    pages.close()


@contextlib.contextmanager
def live_pages(root: Path) -> Iterator[list[float]]:
    """Hold ten pages open; yield the seconds that each load of one takes."""
    command = [sys.executable, "-m", "agentrl", "ui", str(root), "--port", "0"]
    ended, loads = threading.Event(), list[float]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        link = server.stdout.readline().strip()
        host, token = link.split("/")[2], link.partition("token=")[2]
        client = http.client.HTTPConnection(host)
        client.request("GET", f"/?token={token}")
        cookie = (client.getresponse().getheader("set-cookie") or "").split(";")[0]
        threads = [
            threading.Thread(target=follow, args=(host, cookie, ended, loads), daemon=True)
            for _ in range(PAGES)
        ]
        for thread in threads:
            thread.start()
        time.sleep(2)
        try:
            yield loads
        finally:
            ended.set()
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    record = {"machine": machine(1), "pairs": list[tuple[float, float]]()}
    with tempfile.TemporaryDirectory() as temporary:
        folder, runs = Path(temporary), Path(temporary, "runs")
        os.environ["BENCHMARK_ANSWER"] = str(gateways.write_answer(folder))
        gateway = gateways.Agentrl("live", folder, forget=False)
        (runs / "live").mkdir(parents=True)
        (runs / "live" / "config.json").write_text(json.dumps({"run": {"store": gateway._url}}))
        (runs / "live" / "run_id").write_text(gateway._run)

        def rate(connections: int) -> float:
            shape = gateways.Shape(stream=False, connections=connections, logprobs=False)
            return gateways.measure(gateway, shape, seconds=seconds, at_most=0)["per_second"]

        with gateway.running(folder / "log"):
            gateway.first_answer(folder / "log")
            rates = {connections: rate(connections) for connections in (1, 2, 4, MOST)}
            half = min((1, 2, 4), key=lambda one: abs(rates[one] - max(rates.values()) / 2))
            loads = list[float]()
            for pair in range(PAIRS):
                found: dict[bool, float] = {}
                for with_pages in (True, False) if pair % 2 else (False, True):
                    with live_pages(runs) if with_pages else contextlib.nullcontext([]) as seen:
                        found[with_pages] = rate(half)
                    loads += seen
                record["pairs"].append((found[False], found[True]))
                print(f"without {found[False]:,.0f}/s, with {found[True]:,.0f}/s", flush=True)
    shares = [after / before for before, after in record["pairs"]]
    record |= {"rates": rates, "connections": half, "median": statistics.median(shares),
               "loads": len(loads), "load_s": statistics.median(loads)}  # fmt: skip
    path = HERE / "results" / "gateway.json"
    write_json(path, record)
    lines = [
        "# A gateway with ten live pages\n", "`python benchmarks/window/gateway.py`\n",
        f"{record['machine']}. {half} connections, of at most {max(rates.values()):,.0f} requests "
        f"a second. {len(loads)} loads of a page, {record['load_s']:.2f} s each (median).\n",
        *table(["pair", "without", "with", "share"],
               [[str(i), f"{a:,.0f}", f"{b:,.0f}", f"{b / a:.3f}"]
                for i, (a, b) in enumerate(record["pairs"], 1)]),
        f"\nMedian: {100 * (record['median'] - 1):+.1f} % requests a second.",
    ]  # fmt: skip
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
