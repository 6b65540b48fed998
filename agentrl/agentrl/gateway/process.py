"""The gateway process: the proxy's app over a sampler, wired to the store.

Runs as ``python -m agentrl.gateway.process`` under supervision (see ``handle``), in training and
for ``agentrl serve``. Its listening socket belongs to the supervisor, so connections wait in the
backlog while the process is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
from pydantic import Field

from agentrl.capacity import available_cores, sampler_threads
from agentrl.config.commands import ModelCommand
from agentrl.config.field_types import Table
from agentrl.config.secrets import FORWARD_HEADERS, filled
from agentrl.config.settings.agent import SpeakerSettings
from agentrl.config.settings.gateway import GatewaySettings
from agentrl.config.settings.models import ModelSettings, OtherModelSettings
from agentrl.config.settings.rollouts import RunnerSettings
from agentrl.config.settings.sampler import SamplerSettings, TinkerSettings
from agentrl.process_privacy import hide_memory
from agentrl.supervisor import end_with_parent, first_line
from agentrl.timing import heavy_imports
from agentrl_tracer.store import Store, StoreError
from agentrl_tracer.store.runs import new_boot_id

if TYPE_CHECKING:
    from fastapi import FastAPI

    from agentrl.samplers.embedded import EmbeddedSampler
    from agentrl.samplers.tinker import TinkerSampler
    from agentrl.samplers.vllm.sampler import VllmSampler
    from agentrl_proxy.dependencies import ProviderModel
    from agentrl_proxy.rendering.renderer import Renderer
    from agentrl_proxy.sampler import Sampler

log = logging.getLogger("agentrl")

CANNOT_START = 78  # exit code (EX_CONFIG) of a process that failed before it served
_SAMPLER_POLL_S = 0.25


class GatewayPlan(Table):
    """What a gateway process serves: tables of its command's settings, and its place in a run."""

    model: ModelSettings
    sampler: SamplerSettings
    gateway: GatewaySettings
    models: dict[str, OtherModelSettings] = Field(default_factory=dict[str, OtherModelSettings])
    speakers: dict[str, SpeakerSettings] = Field(default_factory=dict[str, SpeakerSettings])
    rollouts: RunnerSettings | None = None  # budgets of a rollout; None: no limits
    tinker: TinkerSettings | None = None  # sample on Tinker; its key stays in the environment
    host: str = "127.0.0.1"  # as it was asked to listen; a name is allowed as Host
    store: str
    run_id: str | None = None
    operator_key: str | None = None
    adapters: tuple[str, ...] = ()  # all adapters, by the names that agents request
    default_adapter: str | None = None  # answers for unknown models; None: the base model does
    base_names: tuple[str, ...] = ()  # further names for the base model
    agents: dict[str, str] = Field(default_factory=dict[str, str])  # adapter by agent (role)
    adapter_paths: dict[str, Path] = Field(default_factory=dict[str, Path])
    """PEFT folders of fixed adapters, version 0, where no run makes versions."""
    answered_by: str | None = None  # the model in ``models`` that answers in the adapter's place
    trains_beside: bool = False  # a trainer on this machine computes while this samples
    number: int = 0  # of the gateway, among ``gateways`` of one run
    gateways: int = 1
    vllm_url: str | None = None  # sample through this vLLM server
    vllm_wait: float | None = None
    """Seconds to wait for a vLLM server that does not answer yet; None: no limit."""

    @property
    def may_lack_vllm(self) -> bool:
        """Whether others sample until its vLLM server, which it does not start, comes up."""
        return self.gateways > 1 and self.vllm_url is not None and self.vllm_wait is not None

    @classmethod
    def of(cls, command: ModelCommand, *, vllm_url: str | None, **place: Any) -> Self:
        """Plan for a command's settings.

        Args:
            vllm_url: of the server that was started for it; None: the first of
                ``sampler.vllm.url``, if any.
            place: the fields that are not tables of the command.
        """
        vllm = command.sampler.vllm
        return cls(
            model=command.model,
            sampler=command.sampler,
            gateway=command.gateway,
            host=getattr(command.gateway, "host", "127.0.0.1"),
            models=command.models,
            speakers=command.speakers,
            vllm_url=vllm_url or next(iter(vllm.url), None),
            vllm_wait=None if vllm_url else vllm.wait,
            **place,
        )


def import_gateway() -> None:
    """Import what a gateway needs (torch, transformers, the app), which takes seconds."""
    with heavy_imports():
        import agentrl.samplers.embedded  # noqa: F401
        import agentrl_proxy.app
        import agentrl_proxy.server.uvicorn  # noqa: F401


def run_gateway(plan: GatewayPlan, sock: socket.socket) -> None:
    """Serve on ``sock`` until SIGTERM.

    Raises:
        SystemExit: it cannot start (code ``CANNOT_START``), and has logged why.
    """
    with contextlib.ExitStack() as ending:
        try:
            app = _ready_app(plan, ending)
        except Exception as error:
            _log_failure(error)
            sys.exit(CANNOT_START)
        from agentrl_proxy.server.uvicorn import serve_on

        serve_on(app, sock)


def _ready_app(plan: GatewayPlan, ending: contextlib.ExitStack) -> FastAPI:
    import_gateway()
    from opentelemetry.util.re import parse_env_headers

    from agentrl_proxy.app import create_app
    from agentrl_proxy.dependencies import ConnectionLimits, GatewayDependencies
    from agentrl_proxy.rendering.templates import THINKING_SWITCHES
    from agentrl_proxy.requests.speakers import SpeakerRule
    from agentrl_proxy.telemetry.otlp_export import OtlpExporter
    from agentrl_tracer.store.writer import TraceWriter

    # The sampler's thread and the event loop hand the interpreter to each other thousands of times
    # a second; Python's default interval of 5 ms would stall every decode step.
    sys.setswitchinterval(1e-4)
    store = Store(plan.store)
    ending.callback(store.close)
    boot_id = new_boot_id(plan.number)
    store.register_gateway(boot_id, plan.run_id, os.getpid(), gateways=plan.gateways)
    sampler, renderer = make_sampler(plan)
    writer = TraceWriter(store, boot_id)
    ending.callback(writer.close)
    own, budget = plan.gateway, plan.rollouts
    others = {name: provider_model(one) for name, one in plan.models.items()}
    if plan.answered_by is not None:
        others[plan.model.adapter] = replace(others[plan.answered_by], is_policy=True)
    if plan.sampler.thinking is not None and renderer.switches.isdisjoint(THINKING_SWITCHES):
        raise ValueError("sampler.thinking: the model's chat template has no such switch; "
                         "leave it out")  # fmt: skip
    deps = GatewayDependencies(
        sampler=sampler,
        renderer=renderer,
        store=store,
        writer=writer,
        boot_id=boot_id,
        models=dict.fromkeys((plan.model.name, *plan.base_names))
        | {name: name for name in plan.adapters},
        agents=plan.agents,
        default_adapter=plan.default_adapter,
        provider_models=others,
        operator_key=plan.operator_key,
        allowed_hosts=[plan.host, *own.allowed_hosts],
        run_id=plan.run_id,
        base_model=plan.model.name,
        defaults=plan.sampler.model_dump(include={"max_tokens", "temperature", "thinking"}),
        # While another model is evaluated, no unknown name may mean the base model.
        accept_any_model=own.accept_any_model and plan.answered_by is None,
        leave_out_tools=own.leave_out_tools,
        speakers=[SpeakerRule(name, **rule.model_dump()) for name, rule in plan.speakers.items()],
        max_concurrent=own.max_concurrent,
        max_queued=own.max_queued,
        limits=ConnectionLimits(
            receive_s=own.receive_timeout,
            receive_bytes=own.receive_mib * 2**20,
            stall_s=own.stall_timeout,
            grace_s=own.grace,
        ),
        max_calls_per_rollout=budget and budget.max_calls_per_rollout,
        max_tokens_per_rollout=budget and budget.max_tokens_per_rollout,
        forward=OtlpExporter(
            own.forward_otlp, parse_env_headers(os.environ.get(FORWARD_HEADERS, ""), liberal=True)
        )
        if own.forward_otlp
        else None,
    )
    ending.callback(sampler.stop)
    sampler.start()
    deps.context_length = sampler.context_length  # known once it runs
    if plan.vllm_url is None and plan.tinker is None:
        stopping = threading.Event()
        ending.callback(stopping.set)
        threading.Thread(target=_end_with_sampler, args=(sampler, stopping), daemon=True).start()
    adapters = [(name, 0, str(path)) for name, path in plan.adapter_paths.items()]
    if not adapters and plan.adapters and plan.run_id:
        adapters = [(a.name, a.version, a.path) for a in store.latest_adapters(plan.run_id)]
    for name, version, path in adapters:  # the first request must find them
        sampler.load_now(name, version, path)
    return create_app(deps)


def _log_failure(error: Exception) -> None:
    """Log one line for errors whose cause is outside the process, else a traceback too."""
    from agentrl.samplers.vllm.api import VllmError

    said, unexpected = " ".join(str(error).split()), None
    if not isinstance(error, ValueError | OSError | StoreError | VllmError | httpx.HTTPError):
        said, unexpected = f"{type(error).__name__}: {said}", error
    log.critical("the gateway cannot start: %s", said, exc_info=unexpected)


def make_sampler(
    plan: GatewayPlan,
) -> tuple[EmbeddedSampler | VllmSampler | TinkerSampler, Renderer]:
    """Return the sampler, not started yet, and what writes its model's prompts."""
    import torch

    from agentrl_proxy.rendering.renderer import Renderer
    from agentrl_trainer.models.loading import load_base, load_facts

    torch.set_num_threads(1)  # until the model's size is known
    model, tinker = plan.model, plan.tinker
    if tinker is None and plan.vllm_url is None:
        from agentrl.samplers.embedded import EmbeddedSampler

        names = {"device", "dtype", "load_in_4bit", "trust_remote_code", "chat_template"}
        how, gpus = model.model_dump(include=names), torch.cuda.device_count()
        if plan.gateways > 1 and gpus > 1 and model.device in ("auto", "cuda"):
            how["device"] = f"cuda:{plan.number % gpus}"
        base = load_base(model.name, **how)
        cores = max(1, (model.cores or available_cores()) // plan.gateways)
        torch.set_num_threads(sampler_threads(cores, base.parameters, alone=not plan.trains_beside))
        renderer = Renderer(base.tokenizer, stop_ids=base.eos_ids)
        return EmbeddedSampler(base, plan.sampler.weights, plan.sampler.kv_tokens), renderer
    source = tinker.tokenizer if tinker and tinker.tokenizer else model.name
    facts = load_facts(source, **model.of_tokenizer)
    renderer = Renderer(facts.tokenizer, stop_ids=facts.eos_ids)
    if tinker:
        from agentrl.samplers.tinker import TinkerSampler

        tokenizer, eos_ids, length = facts.tokenizer, facts.eos_ids, facts.context_length
        return TinkerSampler(model.name, tinker.base_url, tokenizer, eos_ids, length), renderer
    from agentrl.samplers.vllm.sampler import VllmSampler

    vllm = plan.sampler.vllm
    variable = vllm.key_env
    sampler = VllmSampler(
        plan.vllm_url or "",
        eos_ids=facts.eos_ids,
        context_length=facts.context_length,
        api_key=os.environ[variable] if variable else None,
        wait_s=plan.vllm_wait,
        engines=vllm.engines,
        sleeps=vllm.sleep,
        joins_late=plan.may_lack_vllm,
    )
    return sampler, renderer


def provider_model(settings: OtherModelSettings) -> ProviderModel:
    """Return one of the other models, with its secrets from the environment."""
    from agentrl_proxy.dependencies import ProviderModel

    key = os.environ[settings.api_key_env] if settings.api_key_env else None
    if key is None and settings.api_base:
        key = "none"  # else LiteLLM sends the provider's usual key to whatever is there
    fields = settings.model_dump(exclude={"api_key_env"})
    fields["params"] = filled(fields["params"], os.environ)
    return ProviderModel(**fields, api_key=key)


def _end_with_sampler(sampler: Sampler, stopping: threading.Event) -> None:
    """End the process by SIGTERM when its engine has died; its successor has a working one.

    Requests in progress get their answer (503) and their row before that.
    """
    while not stopping.wait(_SAMPLER_POLL_S):
        if not sampler.healthy:
            log.critical("the sampler has died; ending, to be started again")
            os.kill(os.getpid(), signal.SIGTERM)
            return


def main(argv: Sequence[str]) -> None:
    hide_memory()
    handed = json.loads(first_line(0))
    end_with_parent()
    os.environ.update(handed["environment"])
    plan = GatewayPlan.model_validate(handed["plan"])
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        run_gateway(plan, socket.socket(fileno=int(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
