"""The command line. Knows how to read it and what to print; the work is done elsewhere.

Heavy modules are imported inside the commands: ``agentrl --help`` must not load torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter
from rich.console import Console
from rich.logging import RichHandler
from rich.panel import Panel
from rich.text import Text

from agentrl import __version__
from agentrl.cli.help import command_help
from agentrl.config.commands import COMMANDS
from agentrl.config.errors import ConfigError
from agentrl.config.recorded import recorded
from agentrl.timing import heavy_imports

console = Console()
stderr = Console(stderr=True)

app = App(
    name="agentrl",
    help="Reinforcement learning for the agent you already have.",
    version=__version__,
    exit_on_error=False,
    print_error=False,
    default_parameter=Parameter(negative=()),
)
runs_app = App(name="runs", help="Look at earlier runs.")
app.command(runs_app)

Tokens = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]


@app.command(help_flags=[], version_flags=[])
def train(*tokens: Tokens) -> None:
    """Train a LoRA adapter for an agent.

    Runs the agent on tasks against the model, compares the rewards it emits, updates the
    adapter, swaps it into the model, and again.

    It learns on this machine, with torch and PEFT, or with --backend tinker on Tinker, or any
    server that speaks its protocol; docs/client.md says what differs.
    """
    from agentrl.config.checks import check_warmup
    from agentrl.config.commands import TrainConfig
    from agentrl.config.loading import load, parse_flags
    from agentrl.config.tasks import load_tasks, steps_of
    from agentrl.console.live import TrainDisplay
    from agentrl.console.report import serve_command, training_report
    from agentrl.runner import validate_agent
    from agentrl.runs.folder import RunFolder, how_to_fetch
    from agentrl.training.resume import check_resume, tell_changes
    from agentrl.training.session import Session

    flags = parse_flags(TrainConfig, tokens)
    config, resume = load(TrainConfig, flags), flags.resume
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    tasks = load_tasks(config.agent.tasks, "tasks")
    eval_tasks = (
        load_tasks(config.evaluation.tasks, "eval_tasks") if config.evaluation.tasks else []
    )
    check_warmup(
        config.learning.warmup_steps, steps_of(config, tasks)
    )  # before config.json says so
    if resume is not None:
        folder = RunFolder.existing(resume)
        folder.lock()
        changes = check_resume(folder, config, tasks, eval_tasks)
        tell_changes(changes, lambda said: console.print(said, markup=False, highlight=False))
    else:
        folder = RunFolder.create(config.run.folder, config.run.name, "train")
    console.print(f"[dim]run folder {folder.root}[/]", soft_wrap=True)
    console.print("[dim]loading torch, the gateway and the runners[/]")
    with (
        Session(folder, config, "train", imports_torch=True) as session,
        # After the session: it has a thread, and the session may fork.
        TrainDisplay(console, f"agentrl · {folder.name}", since=session.started) as display,
    ):
        with heavy_imports():
            from agentrl.training.loop import train as run_training
            from agentrl.training.run import TrainingRun

        summary = run_training(TrainingRun(config, tasks, eval_tasks, session, display))
    console.print(training_report(summary))
    if summary.learned_nothing:  # whatever waits for a better adapter has to know
        sys.exit(1)
    # Outside the panel: a line to copy must not be wrapped into a frame.
    if fetched := how_to_fetch(summary.adapter):
        for command in fetched:
            console.print(f"it is on Tinker; fetch it:  [b cyan]{command}[/]", soft_wrap=True)
        return
    command = serve_command(
        summary, config.model.name, trust_remote_code=config.model.trust_remote_code
    )
    console.print(f"serve it:  [b cyan]{command}[/]", soft_wrap=True)


@app.command(name="eval", help_flags=[], version_flags=[])
def evaluate(*tokens: Tokens) -> None:
    """Run an agent on tasks and count its successes."""
    from agentrl.cli.eval import evaluate as run_evaluation
    from agentrl.config.commands import EvalConfig
    from agentrl.config.loading import load, parse_flags
    from agentrl.runner import validate_agent

    config = load(EvalConfig, parse_flags(EvalConfig, tokens))
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    run_evaluation(config, console)


@app.command(help_flags=[], version_flags=[])
def run(*tokens: Tokens) -> None:
    """Run an agent on one task and print its trace: spans, calls, rewards, output, errors."""
    from agentrl.cli.run import run_once
    from agentrl.config.commands import RunConfig
    from agentrl.config.loading import load, parse_flags
    from agentrl.runner import validate_agent

    config = load(RunConfig, parse_flags(RunConfig, tokens))
    validate_agent(config.agent.entrypoint, other_python=config.agent.python is not None)
    if not run_once(config, console):
        sys.exit(1)


@app.command(help_flags=[], version_flags=[])
def runner(*tokens: Tokens) -> None:
    """Join a run that is under way with more runners, from this or another machine."""
    from agentrl.cli.runner import join
    from agentrl.config.commands import JoinConfig
    from agentrl.config.loading import load, parse_flags

    join(load(JoinConfig, parse_flags(JoinConfig, tokens)), console)


@app.command(name="tinker-server")
def tinker_server(
    *models: str, folder: Path = Path("runs/tinker"), host: str = "127.0.0.1", port: int = 8787
) -> None:
    """Run scripts for Tinker's SDK on this machine: a server that speaks its protocol.

    Anybody who reaches it may use it: any key is accepted.

    Args:
        models: Base models that it says it has; others may be asked for all the same.
        folder: Where states and sampler weights are saved.
        host: Address to listen on.
        port: Port to listen on.
    """
    import torch
    import uvicorn

    from agentrl.tinker_server import create_app

    torch.set_num_threads(1)  # training and sampling threads share the cores
    named = list(models) or ["agentrl-tiny"]
    console.print(
        f"Run your scripts with\n\nTINKER_BASE_URL=http://{host}:{port} TINKER_API_KEY=tml-local\n",
        soft_wrap=True,
        highlight=False,
    )
    uvicorn.run(create_app(folder, named), host=host, port=port, log_level="warning")


@app.command(help_flags=[], version_flags=[])
def serve(*tokens: Tokens) -> None:
    """Serve a model, with or without a trained adapter, over the OpenAI API."""
    from agentrl.config.commands import ServeConfig
    from agentrl.config.loading import load, parse_flags
    from agentrl.gateway.handle import GatewayHandle
    from agentrl.gateway.process import GatewayPlan
    from agentrl.runs.folder import adapter_folders
    from agentrl.samplers.vllm.server import planned_server
    from agentrl_proxy.server.uvicorn import bind, url_of

    settings = load(ServeConfig, parse_flags(ServeConfig, tokens))
    adapters = (
        adapter_folders(settings.model.adapter_path, settings)
        if settings.model.adapter_path
        else {}
    )
    try:
        sock = bind(
            settings.gateway.host, settings.gateway.port, operator_key=settings.gateway.operator_key
        )
    except (ValueError, OSError) as error:
        raise ConfigError(f"gateway.host/gateway.port: {error}") from error
    url = url_of(sock)
    name = next(iter(adapters), settings.model.name)
    names = " and ".join(adapters) or settings.model.name
    console.print(f"[b]{names}[/] answers at [b cyan]{url}/v1[/] once the model is loaded. Try:\n")
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Who are you?"}]})
    authorization = " -H 'authorization: Bearer '$KEY" if settings.gateway.operator_key else ""
    # No panel: a command that people copy must not be wrapped into a frame.
    console.print(
        f"curl {url}/v1/chat/completions{authorization} -H 'content-type: application/json' "
        f"-d '{body}'\n",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    log = (
        Path("vllm.log") if "://" in settings.run.store else Path(f"{settings.run.store}.vllm.log")
    )
    vllm = planned_server(settings, log, max_rank=None, adapters=adapters.values())
    plan = GatewayPlan.of(
        settings,
        vllm_url=vllm.url if vllm else None,
        store=settings.run.store,
        operator_key=settings.gateway.operator_key,
        adapters=tuple(adapters),
        default_adapter=name if len(adapters) == 1 else None,
        agents=settings.adapter_of_agent,
        adapter_paths=adapters,
    )
    gateway = GatewayHandle(plan, None, sock)
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        stack.enter_context(_interrupted_by_sigterm())
        if vllm is not None:
            stack.callback(vllm.stop)
            log.parent.mkdir(parents=True, exist_ok=True)
            console.print(f"[dim]starting vLLM; its log is {log}[/]", soft_wrap=True)
            vllm.start()
            with console.status("vLLM starts") as status:
                vllm.wait(status.update if console.is_terminal else console.print)
        gateway.start()
        stack.callback(gateway.stop)
        gateway.watch()


@app.command
def export(
    source: Annotated[str, Parameter(help="A run folder, RUN@STEP, or a PEFT folder.")],
    out: Annotated[Path, Parameter(help="Folder to write; it must not exist.")],
    *,
    merged: Annotated[bool, Parameter(help="Merge the adapter into the base model.")] = False,
    model: Annotated[str | None, Parameter(help="Base model; by default the run's.")] = None,
    adapter: Annotated[str | None, Parameter(help="Which one, where a run has several.")] = None,
    trust_remote_code: Annotated[
        bool, Parameter(help="To merge, run the code that comes with the base model.")
    ] = False,
) -> None:
    """Write a trained adapter as PEFT folder or merged model, for vLLM, Ollama and others."""
    from agentrl.export.adapter import export as write

    with console.status("merging" if merged else "copying"):
        exported = write(
            source, out, merged=merged, model=model, adapter=adapter,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    kind = "model" if exported.merged else "adapter"
    console.print(f"{kind} written to [b]{exported.folder}[/]; serve it with one of:")
    for server, commands in exported.servers.items():
        console.print(f"  [dim]{server}[/]", highlight=False)
        for command in commands:
            console.print(f"    [cyan]{command}[/]", soft_wrap=True, highlight=False)


@runs_app.command(name="list")
def list_runs(
    runs: Annotated[Path, Parameter(help="Folder of run folders.")] = Path("runs"),
) -> None:
    """List the runs in a folder."""
    from agentrl.console.report import runs_table
    from agentrl_tracer.store import Store

    found: list[dict[str, Any]] = []
    metrics: list[dict[int, dict[str, float]]] = []
    for path in sorted(runs.glob("*/store.db")):
        store = Store(str(path))
        for run in store.runs():
            found.append(run)
            metrics.append(store.metrics(run["id"]))
        store.close()
    if not found:
        console.print(f"no runs in {runs}")
        return
    console.print(runs_table(found, metrics))


@runs_app.command(name="show")
def show_run(
    run: Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")],
    *,
    rollout: Annotated[str | None, Parameter(help="Show the trace of this rollout.")] = None,
) -> None:
    """Show one run: its steps, and where its calls went; or one of its rollouts, as a tree."""
    from agentrl.console.report import show_run as show
    from agentrl.runs.folder import RunFolder
    from agentrl_tracer.store import Store

    folder = RunFolder.existing(run)
    settings = json.loads(folder.config.read_text(encoding="utf-8"))
    store = Store(recorded(settings, "run.store") or str(folder.store))
    run_id = folder.run_id.read_text().strip()
    if rollout is not None:
        from agentrl.console.trace_tree import rollout_tree

        found = store.rollouts(run_id, ids=[rollout])
        if not found:
            raise ConfigError(f"rollout: {rollout!r} is no rollout of {folder.name}")
        console.print(rollout_tree(store, found[0]))
        store.close()
        return
    row = next(r for r in store.runs() if r["id"] == run_id)
    metrics, sums = store.metrics(run_id), store.accounting(run_id)
    show(console, row, metrics, sums, store.outcomes(run_id), store.continuity(run_id))
    store.close()


def main() -> None:
    """The ``agentrl`` command."""
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=stderr)]
    )
    try:
        tokens = sys.argv[1:]
        if tokens and tokens[0] in COMMANDS and {"-h", "--help", "--help-all"} & {*tokens}:
            command_help(tokens[0], app[tokens[0]].help, console, everything="--help-all" in tokens)
        else:
            app(tokens, exit_on_error=False, print_error=False)
    except KeyboardInterrupt:
        sys.exit(130)
    except CycloptsError as error:
        _fail(_cyclopts_message(error))
    except ConfigError as error:
        _fail(str(error))
    except ValueError as error:
        _fail(str(error))
    except RuntimeError as error:
        _fail(str(error), code=1)


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """So that whoever is told to end (by systemd, Docker, Kubernetes) ends as with Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _cyclopts_message(error: CycloptsError) -> str:
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name.lstrip("-").replace("-", "_")
        return f"{name}: is missing. {error.argument.parameter.help or ''}".rstrip()
    return str(error)


def _fail(message: str, code: int = 2) -> None:
    stderr.print(Panel(Text(message), title="error", title_align="left", border_style="red"))
    sys.exit(code)


if __name__ == "__main__":
    main()
