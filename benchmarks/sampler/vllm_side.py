"""vLLM's side of ``run.py``: the same requests, offline. Runs in vLLM's venv."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    folder, asked = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    model = LLM(
        model=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=1024, max_num_seqs=len(asked["prompts"]), enable_prefix_caching=True,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    params = [
        SamplingParams(max_tokens=n, min_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
        for n in asked["lengths"]
    ]
    seconds: list[float] = []
    for _ in range(3):
        model.reset_prefix_cache()
        started = time.perf_counter()
        answers = model.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        found = [len(answer.outputs[0].token_ids) for answer in answers]
        assert found == asked["lengths"], "vLLM ended some answers early"
    print(json.dumps({"seconds": min(seconds)}))


if __name__ == "__main__":
    main()
