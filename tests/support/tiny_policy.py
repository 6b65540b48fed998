"""The model that ships with an adapter, as the trainer has it: whose log-probs a sampler's are."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from agentrl.runs.folder import RunFolder
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.lora import attach_adapter, lora_config, save_adapter

RANK = 8


class Policy:
    def __init__(self, rank: int = RANK) -> None:
        base = load_base("agentrl-tiny", device="cpu", dtype="float32")
        self.model = attach_adapter(base, "policy", lora_config(rank, rank), seed=0)

    def become(self, seed: int, folder: Path) -> None:
        """Draws other weights and saves them."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if "lora_B" in name:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
        shutil.rmtree(folder, ignore_errors=True)
        save_adapter(self.model, "policy", folder)

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        found = self._logprobs(prompt, answer)
        return found.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()

    def likeliest(self, prompt: Sequence[int]) -> list[int]:
        return self._logprobs(prompt, [0])[0].topk(3).indices.tolist()

    @torch.no_grad()
    def _logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        logits = self.model(torch.tensor([[*prompt, *answer]])).logits[0]
        return logits[len(prompt) - 1 : -1].float().log_softmax(-1)


def trained_run(runs: Path) -> RunFolder:
    """A run folder with versions 3 and 7 of an adapter."""
    folder = RunFolder.create(runs, "trained", "train")
    folder.write_json(folder.config, {"model": {"name": "agentrl-tiny"}})
    folder.run_id.write_text("run")
    policy = Policy()
    for version in (3, 7):
        policy.become(version, folder.adapter_version("policy", version))
    return folder
