"""``agentrl serve``: serve a model, with or without trained adapters, over the OpenAI API."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from agentrl.cli import Tokens
from agentrl.config.commands import InspectConfig, ServeConfig
from agentrl.config.errors import ConfigError
from agentrl.config.loading import load
from agentrl.config.secrets import store_url
from agentrl.console.output import console, print_line
from agentrl.gateway.handle import GatewayHandle, fetch_model
from agentrl.gateway.process import GatewayPlan
from agentrl.interrupts import end_in_order
from agentrl.runs.best_adapter import which_adapter
from agentrl.runs.folder import adapter_folders
from agentrl.samplers.vllm.server import planned_servers
from agentrl_proxy.server.listening import bind, url_of
from agentrl_tracer.store import Store


def serve_command(*tokens: Tokens) -> None:
    """Serve a model, with or without trained adapters, over the OpenAI API."""
    config = load(ServeConfig, tokens)
    fetch_model(config)
    listen = config.gateway
    adapters = adapter_folders(config, config.model.adapter_path)
    if said := which_adapter(config.model.adapter_path, adapters):
        print_line(said)
    try:
        sock = bind(listen.host, listen.port, operator_key=listen.operator_key)
    except (ValueError, OSError) as error:
        raise ConfigError(f"gateway.host/gateway.port: {error}") from error
    url, names = url_of(sock), list(adapters) or [config.model.name]
    body = {"model": names[0], "messages": [{"role": "user", "content": "Who are you?"}]}
    key = " -H 'authorization: Bearer '$KEY" if listen.operator_key else ""
    print_line(f"{' and '.join(names)} answers at {url}/v1 once the model is loaded. Try:\n")
    print_line(
        f"curl {url}/v1/chat/completions{key} -H 'content-type: application/json' "
        f"-d '{json.dumps(body)}'\n"
    )
    # Within gateway.grace. Told to stop, a server has done its work: code 0.
    with (
        contextlib.suppress(KeyboardInterrupt),
        serving(config, adapters, sock, listen.operator_key) as gateway,
    ):
        gateway.watch()


@contextlib.contextmanager
def serving(
    config: ServeConfig | InspectConfig,
    adapters: Mapping[str, Path],
    sock: socket.socket,
    operator_key: str | None,
) -> Iterator[GatewayHandle]:
    """Run a gateway, and the vLLM that it needs, which record calls without a run."""
    if len(config.sampler.vllm.url) > 1:
        raise ConfigError("sampler.vllm.url: one server answers here; give one URL")
    store = store_url(config.run.store)
    Store(store).close()  # what is wrong with it is said here, not in the gateway's log
    log = Path("vllm.log") if "://" in store else Path(f"{store}.vllm.log")
    servers = planned_servers(config, log, max_rank=None, adapters=adapters.values())
    vllm = servers[0] if servers else None
    plan = GatewayPlan.of(
        config,
        vllm_url=vllm.url if vllm else None,
        store=store,
        operator_key=operator_key,
        adapters=tuple(adapters),
        default_adapter=next(iter(adapters)) if len(adapters) == 1 else None,
        agents=config.adapter_of_agent,
        adapter_paths=adapters,
    )
    gateway = GatewayHandle(plan, None, sock)
    with contextlib.ExitStack() as stack:
        end_in_order(within_s=None)
        if vllm is not None:
            stack.callback(vllm.stop)
            log.parent.mkdir(parents=True, exist_ok=True)
            print_line((f"starting vLLM; its log is {log}", "dim"))
            vllm.start()
            with console.status("vLLM starts") as status:
                vllm.wait(status.update if console.is_terminal else print_line)
        gateway.start()
        stack.callback(gateway.stop)
        yield gateway
