"""Drives a coding agent's command line against a gateway, and records what it sends."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from running_gateway import running, serving
from scripted_sampler import ScriptedSampler

from agentrl.config.profiles import read_profile
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_proxy.requests.speakers import SpeakerRule
from agentrl_proxy.sampler import DecodingParams
from agentrl_tracer.schemas import Call

MARK = "I go on."  # begins the replies that are played, so that they can be counted
Step = tuple[str, dict[str, Any]] | str
"""A tool call, name and arguments, or a text."""


@dataclass
class Wire:
    """The requests that reached the gateway; an ASGI app around its own."""

    app: Any
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def state(self) -> Any:
        return self.app.state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        one: dict[str, Any] = {"method": scope["method"], "path": scope["path"], "headers": headers}
        one |= {"query": scope["query_string"].decode(), "body": b"", "status": 0, "said": b""}
        self.requests.append(one)

        async def receiving() -> Any:
            message = await receive()
            one["body"] += message.get("body", b"")
            return message

        async def sending(message: Any) -> None:
            one["status"] = message.get("status", one["status"])
            one["said"] += message.get("body", b"")
            await send(message)

        await self.app(scope, receiving, sending)


SUMMARY = "Summary of the work so far: a.py was read."
_COMPACTS = "create a detailed summary"  # in the last message of Claude Code, which sends tools


@dataclass
class Player:
    """Plays the steps in each conversation that has tools, and ``plain`` in the others.

    One that goes on from ``SUMMARY`` is done.
    """

    renderer: Renderer
    steps: Sequence[Step]
    plain: Sequence[str] = ("A short answer.",)

    def __call__(self, prompt_ids: Sequence[int], params: DecodingParams, choice: int) -> str:
        text = self.renderer.decode_raw(list(prompt_ids))
        turn = text.count(f"<|im_start|>assistant\n{MARK}")
        if SUMMARY in text:
            return "Done."
        if _COMPACTS in text.rpartition("<|im_start|>user")[2]:
            return SUMMARY
        if "<tools>" not in text:
            return self.plain[min(turn, len(self.plain) - 1)]
        step = self.steps[turn] if turn < len(self.steps) else "Done."
        if isinstance(step, str):
            return step
        call = {"name": step[0], "arguments": step[1]}
        return f"{MARK}\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


@dataclass
class Session:
    """What a coding agent did in one rollout."""

    code: int
    printed: str
    calls: list[Call]
    requests: list[dict[str, Any]]

    def reasons(self, agent: str) -> Counter[str]:
        """Count an agent's calls by how they continue: a branch's reason, or ``continued``."""
        mine = [call.params for call in self.calls if call.agent == agent]
        return Counter(params.get("branched") or "continued" for params in mine)


def play(name: str, work: Path, renderer: Renderer, steps: Sequence[Step], **how: Any) -> Session:
    """Run an agent by its profile on the folder ``work``, with a sampler that plays the steps.

    Args:
        how: ``path``, folders of executables; ``plain``, see Player; ``context``, its length.
    """
    profile = read_profile(name)
    assert profile is not None
    rules = [SpeakerRule(agent, **rule) for agent, rule in profile["speakers"].items()]
    player = Player(renderer, steps, **({"plain": how["plain"]} if "plain" in how else {}))
    leave_out = profile.get("gateway", {}).get("leave_out_tools", False)
    context = how.get("context", 65536)
    home = work.parent / "home"
    home.mkdir()
    with running(
        work.parent,
        renderer,
        {},
        sampler=ScriptedSampler(renderer, player),
        context_length=context,
        defaults={"max_tokens": 4096},
        speakers=rules,
        leave_out_tools=leave_out,
    ) as gateway:
        wire = Wire(gateway.app)
        with serving(wire) as url:
            claim = gateway.claims[0]
            base = f"{url}/rollouts/{claim.rollout_id}"
            env = {
                "PATH": f"{how['path']}:{os.environ['PATH']}",
                "HOME": str(home),
                "OPENAI_BASE_URL": f"{base}/v1",
                "OPENAI_API_BASE": f"{base}/v1",
                "OPENAI_API_KEY": claim.key,
                "ANTHROPIC_BASE_URL": base,
                "ANTHROPIC_API_KEY": claim.key,
                "AGENTRL_MODEL": "policy",
                "AGENTRL_CONTEXT_LENGTH": str(context),
                "TMPDIR": str(work.parent / "attempt"),
                "TERM": "dumb",
                "LANG": "C.UTF-8",
            }
            words = shlex.split(profile["agent"]["entrypoint"].removeprefix("-- "))
            say = how.get("say", "- Fix a.py.")  # as of a list in Markdown, not a flag
            command = [say if word == "{instruction}" else word for word in words]
            process = subprocess.Popen(
                command,
                cwd=work,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                printed, _ = process.communicate(timeout=150)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        text = json.dumps(say)[1:-1].encode()
        assert any(text in request["body"] for request in wire.requests), printed
        assert not any(home.iterdir()), "it wrote into the user's home folder"
        left = [*(work.parent / "attempt").glob("home-*")]
        assert not left, "its own home folder was not removed"
        return Session(process.returncode, printed, gateway.calls(claim), wire.requests)
