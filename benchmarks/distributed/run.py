"""Several trainer processes beside one: equal results, CPU seconds of a rank, bytes sent.

python benchmarks/distributed/run.py            # 12 minutes on two idle cores
python benchmarks/distributed/run.py --smoke    # does everything run?
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from agentrl_trainer.data.training_row import TrainingRow
from agentrl_trainer.distributed.plan import RankPlan
from agentrl_trainer.distributed.ranks import Followers, RankedLearner
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.loss_options import AdamParams
from agentrl_trainer.models.loading import load_base

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))
from benchmarks.reporting import machine, table, write_json  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "distributed"
MODEL: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
ADAM = AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one seed, the tiny model, no results")
    parser.add_argument("--case", nargs=3, metavar=("MODEL", "RANKS", "SEED"), help="internal")
    given = parser.parse_args()
    if given.case:
        model, ranks, seed = given.case
        print(json.dumps(measure(model, ranks, int(seed))))
        return
    where = machine(1)
    seeds, steady = (
        range(1 if given.smoke else 5),
        "agentrl-tiny" if given.smoke else "smollm2-135m",
    )
    kinds = ("1", "2", "3", "2 sharded", "3 sharded")
    equal = {kind: [case("agentrl-tiny", kind, seed) for seed in seeds] for kind in kinds}
    speed = {kind: case(steady, kind, 0) for kind in ("1", "2", "2 sharded")}
    goals = {"2": ("1e-6", ""), "3": ("1e-6", ""), "2 sharded": ("", "1e-3")}
    goals["3 sharded"] = goals["2 sharded"]
    report = [
        where, "", "Beside one learner, agentrl-tiny, the largest of "
        f"{len(seeds)} seeds after 6 steps of 32 rows with two adapters, PPO and clipping:", "",
        *table(
            ["ranks", "loss, relative", "gradients of the first step, relative",
             "adapters, relative", "goal", "of their update", "goal", "bytes a step and rank"],
            [["1, other micro-batches" if kind == "1" else kind,
              *(f"{max(one[key] for one in found):.1e}"
                for key in ("loss", "gradients", "weights")),
              goals.get(kind, ("", ""))[0], f"{max(one['update'] for one in found):.1e}",
              goals.get(kind, ("", ""))[1], f"{found[0]['bytes']:,.0f}"]
             for kind, found in equal.items()],
        ), "", f"A step of 64 rows (8 groups, 64 + 64 tokens) of {steady}, one thread a rank:", "",
        *table(
            ["ranks", "seconds", "CPU seconds of a rank, the largest", "of one process", "goal",
             "MB of the base in a rank", "of one process", "goal"],
            [[kind, f"{one['seconds']:.1f}", f"{max(one['cpu']):.1f}",
              f"{max(one['cpu']) / max(speed['1']['cpu']):.2f}", "≤ 0.6" if kind == "2" else "",
              f"{one['base'] / 1e6:.0f}", f"{one['base'] / speed['1']['base']:.2f}",
              "≤ 0.6" if "sharded" in kind else ""]
             for kind, one in speed.items()],
        ),
    ]  # fmt: skip
    print("\n".join(report))
    if not given.smoke:
        write_json(RESULTS.with_suffix(".json"), {"machine": where, "equal": equal, "speed": speed})
        RESULTS.with_suffix(".md").write_text("\n".join(report) + "\n")


def case(model: str, ranks: str, seed: int) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--case", model, ranks, str(seed)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, ranks: str, seed: int) -> dict[str, Any]:
    """Measure a number of ranks, such as ``2`` or ``2 sharded``."""
    torch.set_num_threads(1)
    first: dict[str, Any] = {"adapters": ("a",), "rank": 16, "seed": seed}
    size, shard = int(ranks[0]), "sharded" in ranks
    followers = Followers(RankPlan(model, MODEL, size, shard=shard))
    base = followers.start().load() if shard else followers.plan.load()
    held = sum(getattr(one, "_local_tensor", one).nbytes for one in base.model.parameters())
    ranked: Any = RankedLearner(followers, base, first) if size > 1 else Learner(base, **first)
    ranked.add_adapter("b", rank=8, seed=seed + 1)
    if model == "agentrl-tiny":
        # One process is compared with itself, packed otherwise: what rounding alone makes.
        budget = 400 if size == 1 else None
        one = Learner(load_base(model, **MODEL), **first, token_budget=budget)
        one.add_adapter("b", rank=8, seed=seed + 1)
        found = compare(one, ranked, seed)
        sent = ranked.sent / 6 if size > 1 else 0
    else:
        found, sent = dict[str, Any](), 0
    ranked.forward_backward(rows(seed, 1, 4, 4))  # followers start, and everyone warms up
    ranked.optim_step(ADAM)
    pids = [os.getpid(), *(one.process.pid for one in followers.running)]
    work, before, began = rows(seed, 8, 64, 64, ("a",)), [cpu(pid) for pid in pids], time.time()
    ranked.forward_backward(work)
    ranked.optim_step(ADAM)
    found |= {"seconds": time.time() - began, "bytes": sent, "base": held}
    found["cpu"] = [cpu(pid) - start for pid, start in zip(pids, before, strict=True)]
    followers.end()
    return found


def compare(one: Learner, ranked: Any, seed: int) -> dict[str, Any]:
    """Make the same 6 steps with both; return the largest relative differences."""
    loss, gradients, start = 0.0, 0.0, state_of(one, "weights/")
    for step in range(6):
        work = rows(1000 * seed + step, 8, 40, 24)[:32]
        losses = [of.forward_backward(work, "ppo").loss for of in (one, ranked)]
        for of in (one, ranked):
            of.optim_step(ADAM)
        loss = max(loss, abs(losses[1] - losses[0]) / abs(losses[0]))
        if step == 0:  # Adam's first moment is a tenth of the gradient
            gradients = relative(*(state_of(of, "exp_avg/") for of in (one, ranked)))
    ours, theirs = (state_of(of, "weights/") for of in (one, ranked))
    update = relative(ours - start, theirs - start)
    return {
        "loss": loss, "gradients": gradients, "weights": relative(ours, theirs), "update": update,
    }  # fmt: skip


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / ours.norm())


def state_of(learner: Any, kind: str) -> torch.Tensor:
    state = learner.state_dict()
    return torch.cat([one.flatten() for key, one in state.items() if kind in key]).double()


def rows(
    seed: int, groups: int, prompt: int, answer: int, adapters: tuple[str, ...] = ("a", "b")
) -> list[TrainingRow]:
    """Groups of eight (of four with a short answer) rows behind a common prompt."""
    draw, found = random.Random(seed), list[TrainingRow]()
    for group in range(groups):
        shared = [draw.randrange(5, 200) for _ in range(prompt)]
        for _ in range(8 if answer >= 64 else 4):
            tokens = shared + [draw.randrange(5, 200) for _ in range(answer)]
            mask = [False] * prompt + [True] * answer
            advantage = draw.gauss(0, 1)
            logprobs = [-5.0 * on for on in mask]
            advantages = [advantage * on for on in mask]
            adapter = adapters[group % len(adapters)]
            found.append(TrainingRow(tokens, mask, logprobs, advantages, adapter))
    return found


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
