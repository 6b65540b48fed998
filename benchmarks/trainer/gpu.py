"""The trainer on a GPU: models of Qwen3's shapes with random weights, agentrl beside TRL + peft.

    python benchmarks/trainer/gpu.py [--trl-python PYTHON] [--shape qwen3-0.6b qwen3-4b]
    python benchmarks/trainer/gpu.py --shape tiny --device cpu      # does it work at all?

Forward and backward of a GRPO step in bfloat16 with float32 adapters of rank 32, in trained
tokens/s, and as a share of the card's peak (``--peak-tflops`` where the card is not known here).
The share counts what a model *has* to compute for unique tokens: 4 flops a frozen weight and
token (forward, and the gradient of the input; there is none of the weight), 6 an adapter weight,
attention over each token's path, and the output embedding at trained positions. TRL's share is of
the same useful flops, so that computing a prefix again is no merit. Every measurement is a process
of its own; what does not fit or fails is listed and the rest goes on. Writes ``results/gpu.md`` and
``.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks.trainer.cases import GPU_CASES, GPU_RANK, SHAPES, Row  # noqa: E402

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0,
               "RTX 4090": 165.0, "A10G": 70.0}  # fmt: skip
"""Dense bfloat16 with float32 accumulation, from the vendor's data sheets."""
HEADS = ["model", "case", "agentrl tokens/s", "TRL tokens/s (its rows)", "ratio",
         "agentrl share of peak", "TRL share of peak", "peak GB, agentrl / TRL"]  # fmt: skip


def useful_flops(rows: list[Row], shape: dict[str, Any]) -> float:
    """Of one forward and backward over each distinct prefix once."""
    hidden, head, inner = shape["hidden_size"], shape["head_dim"], shape["intermediate_size"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    sizes = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
    sizes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    layers = shape["num_hidden_layers"]
    frozen = layers * sum(a * b for a, b in sizes)
    adapter = layers * sum(GPU_RANK * (a + b) for a, b in sizes)
    tokens = pairs = 0
    before: list[int] = []
    for row in sorted([*one.prompt, *one.completion] for one in rows):
        same = (i for i, (a, b) in enumerate(zip(before, row, strict=False)) if a != b)
        shared = next(same, min(len(before), len(row)))
        tokens += len(row) - shared
        pairs += (len(row) * (len(row) + 1) - shared * (shared + 1)) // 2
        before = row
    trained = sum(sum(row.trained) for row in rows)
    # Scores and their use, forward (2 products) and backward (4), of 2 flops each.
    attention = layers * pairs * q * 12
    return tokens * (4 * frozen + 6 * adapter) + attention + trained * 4 * hidden * shape["vocab"]


def measured(python: str, script: str, arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [python, str(HERE / script), *arguments], capture_output=True, text=True, timeout=1800,
        check=False,
    )  # fmt: skip
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:160]}
    return json.loads(done.stdout.splitlines()[-1])


def best(found: list[dict[str, Any]]) -> dict[str, Any]:
    worked = [one for one in found if "failed" not in one]
    return min(worked, key=lambda one: one["seconds"]) if worked else (found or [{}])[0]


def line(shape: str, case: str, one: dict[str, Any], peak: float | None) -> list[str]:
    ours, theirs = one["agentrl"], best(one["trl"])

    def rate(side: dict[str, Any]) -> str:
        if "seconds" not in side:
            return side.get("failed", "not run")
        rows = f" ({side['rows']})" if "rows" in side else ""
        return f"{side['trained_tokens'] / side['seconds']:,.0f}{rows}"

    def share(side: dict[str, Any]) -> str:
        if "seconds" not in side or not peak:
            return "-"
        return f"{one['useful_flops'] / side['seconds'] / (peak * 1e12):.1%}"

    both = "seconds" in ours and "seconds" in theirs
    ratio = f"**{theirs['seconds'] / ours['seconds']:.1f}**" if both else "-"
    memory = " / ".join(
        f"{x['gigabytes']:.1f}" if "gigabytes" in x else "-" for x in (ours, theirs)
    )
    return [shape, case, rate(ours), rate(theirs), ratio, share(ours), share(theirs), memory]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", help="python of a venv with TRL; without it, agentrl alone")
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=["qwen3-0.6b", "qwen3-4b"])
    parser.add_argument("--case", nargs="*", choices=GPU_CASES, default=list(GPU_CASES))
    parser.add_argument("--rows", nargs="*", type=int, default=[4, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    card = torch.cuda.get_device_name() if options.device.startswith("cuda") else "no GPU"
    known = (tflops for name, tflops in PEAK_TFLOPS.items() if name in card)
    peak = options.peak_tflops or next(known, None)
    about = {"date": time.strftime("%Y-%m-%d %H:%M"), "card": card, "peak_tflops": peak,
             "torch": torch.__version__, "repeats": options.repeats}  # fmt: skip
    options.results.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    lines: list[list[str]] = []
    for shape in options.shape:
        for case in options.case:
            shared = ["--case", case, "--shape", shape, "--repeats", str(options.repeats),
                      "--device", options.device]  # fmt: skip
            one: dict[str, Any] = {
                "useful_flops": useful_flops(GPU_CASES[case](shape), SHAPES[shape]),
                "agentrl": measured(sys.executable, "gpu_side.py", [*shared, "--side", "agentrl"]),
                "trl": [
                    measured(
                        options.trl_python, "gpu_side.py",
                        [*shared, "--side", "trl", "--rows", str(rows)],
                    ) | {"rows": rows}
                    for rows in (options.rows if options.trl_python else [])
                ],
            }  # fmt: skip
            results[f"{shape}: {case}"] = one
            lines.append(line(shape, case, one, peak))
            print(" | ".join(lines[-1]), flush=True)
            record = {"about": about, "cases": results}
            (options.results / "gpu.json").write_text(json.dumps(record, indent=2) + "\n")
            ruler = ["---", "---", *["--:"] * (len(HEADS) - 2)]
            table = "\n".join(f"| {' | '.join(x)} |" for x in (HEADS, ruler, *lines))
            head = f"{about['date']}, {card} ({peak} TFLOP/s), torch {torch.__version__}."
            (options.results / "gpu.md").write_text(f"{head}\n\n{table}\n")


if __name__ == "__main__":
    main()
