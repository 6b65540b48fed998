"""The command line. Knows how to read it and what to print; the work is done elsewhere.

Heavy modules are imported inside the commands: ``agentrl --help`` must not load torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import App, CycloptsError, MissingArgumentError, Parameter
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.logging import RichHandler
from rich.panel import Panel
from rich.text import Text

from agentrl import __version__
from agentrl.config.settings import (
    AGENT_HELP,
    ConfigError,
    EvalConfig,
    EvalSettings,
    JoinSettings,
    RunConfig,
    RunSettings,
    ServeConfig,
    TrainConfig,
    TrainSettings,
    check_warmup,
    explain,
    tables_as_json,
)
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

Agent = Annotated[str | None, Parameter(help=AGENT_HELP)]


@app.command
def train(
    agent: Agent = None,
    *,
    settings: TrainSettings,
    resume: Annotated[Path | None, Parameter(help="Go on with an earlier run: its folder.")] = None,
) -> None:
    """Train a LoRA adapter for an agent.

    Runs the agent on tasks against the model, compares the rewards it emits, updates the
    adapter, swaps it into the model, and again.

    It learns on this machine, with torch and PEFT, or with --backend tinker on Tinker, or any
    server that speaks its protocol; docs/client.md says what differs.
    """
    from agentrl.config.tasks import load_tasks, steps_of
    from agentrl.console.live import TrainDisplay
    from agentrl.console.report import serve_command, training_report
    from agentrl.runner import validate_agent
    from agentrl.runs.folder import RunFolder, how_to_fetch
    from agentrl.training.resume import check_resume, tell_changes
    from agentrl.training.session import Session

    config = _with_agent(TrainConfig, agent, settings)
    validate_agent(config.agent, other_python=config.python is not None)
    tasks = load_tasks(config.tasks, "tasks")
    eval_tasks = load_tasks(config.eval_tasks, "eval_tasks") if config.eval_tasks else []
    check_warmup(config.warmup_steps, steps_of(config, tasks))  # before config.json says so
    if resume is not None:
        folder = RunFolder.existing(resume)
        folder.lock()
        changes = check_resume(folder, config, tasks, eval_tasks)
        tell_changes(changes, lambda said: console.print(said, markup=False, highlight=False))
    else:
        folder = RunFolder.create(config.runs, config.name, "train")
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
    command = serve_command(summary, config.model, trust_remote_code=config.trust_remote_code)
    console.print(f"serve it:  [b cyan]{command}[/]", soft_wrap=True)


@app.command(name="eval")
def evaluate(agent: Agent = None, *, settings: EvalSettings) -> None:
    """Run an agent on tasks and count its successes."""
    from agentrl.cli.eval import evaluate as run_evaluation
    from agentrl.runner import validate_agent

    config = _with_agent(EvalConfig, agent, settings)
    validate_agent(config.agent, other_python=config.python is not None)
    run_evaluation(config, console)


@app.command
def run(agent: Agent = None, *, settings: RunSettings) -> None:
    """Run an agent on one task and print its trace: spans, calls, rewards, output, errors."""
    from agentrl.cli.run import run_once
    from agentrl.runner import validate_agent

    config = _with_agent(RunConfig, agent, settings)
    validate_agent(config.agent, other_python=config.python is not None)
    if not run_once(config, console):
        sys.exit(1)


@app.command
def runner(agent: Agent = None, *, settings: JoinSettings) -> None:
    """Join a run that is under way with more runners, from this or another machine."""
    from agentrl.cli.runner import join

    join(agent, settings, console)


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


@app.command
def serve(*, settings: ServeConfig | None = None) -> None:
    """Serve a model, with or without a trained adapter, over the OpenAI API."""
    settings = settings or ServeConfig()  # pyright: ignore[reportCallIssue]
    from agentrl.gateway.process import Gateway, GatewaySettings
    from agentrl.runs.folder import adapter_folders
    from agentrl.samplers.vllm.server import planned_server
    from agentrl_proxy.server.uvicorn import bind, url_of

    adapters = adapter_folders(settings.adapter_path, settings) if settings.adapter_path else {}
    try:
        sock = bind(settings.host, settings.port, operator_key=settings.operator_key)
    except (ValueError, OSError) as error:
        raise ConfigError(f"host/port: {error}") from error
    url = url_of(sock)
    name = next(iter(adapters), settings.model)
    names = " and ".join(adapters) or settings.model
    console.print(f"[b]{names}[/] answers at [b cyan]{url}/v1[/] once the model is loaded. Try:\n")
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Who are you?"}]})
    authorization = " -H 'authorization: Bearer '$KEY" if settings.operator_key else ""
    # No panel: a command that people copy must not be wrapped into a frame.
    console.print(
        f"curl {url}/v1/chat/completions{authorization} -H 'content-type: application/json' "
        f"-d '{body}'\n",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    log = Path("vllm.log") if "://" in settings.store else Path(f"{settings.store}.vllm.log")
    vllm = planned_server(settings, log, max_rank=None, adapters=adapters.values())
    gateway = Gateway(
        GatewaySettings(
            store=settings.store,
            model=settings.model,
            adapter=name if len(adapters) == 1 else None,
            adapters=tuple(adapters),
            agents=settings.adapter_of_agent,
            device=settings.device,
            dtype=settings.dtype,
            load_in_4bit=settings.load_in_4bit,
            trust_remote_code=settings.trust_remote_code,
            operator_key=settings.operator_key,
            run_id=None,
            max_tokens=settings.max_tokens,
            models=settings.model_dump(mode="json")["models"],
            adapter_paths={name: str(path) for name, path in adapters.items()},
            **settings.gateway_limits(),
            vllm_url=vllm.url if vllm else settings.vllm_url,
            vllm_key_env=settings.vllm_key_env,
            vllm_wait=None if vllm else settings.vllm_wait,
        ),
        None,
        sock,
    )
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
    store = Store(settings.get("store") or str(folder.store))
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


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    config: Annotated[Path | None, Parameter(help="TOML or YAML file of settings.")] = None,
) -> None:
    """Runs a command; its settings come from flags, else environment, else file, else resumed."""
    sources: list[Any] = [cyclopts.config.Env("AGENTRL_", command=False)]
    if config is not None:
        sources.append(_config_file(config))
    if resumed := _resumed_settings(tokens):
        sources.append(_source(resumed, "resume"))
    app.config = tuple(sources)
    app(tokens)


def main() -> None:
    """The ``agentrl`` command."""
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=stderr)]
    )
    try:
        app.meta(exit_on_error=False, print_error=False)
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


def _with_agent(kind: type[Any], agent: str | None, settings: BaseModel) -> Any:
    try:
        return kind(**{**settings.model_dump(), "agent": agent or ""})
    except ValidationError as error:
        raise ConfigError(explain(error, kind)) from error


def _config_file(path: Path) -> Any:
    kinds = {
        ".toml": cyclopts.config.Toml,
        ".yaml": cyclopts.config.Yaml,
        ".yml": cyclopts.config.Yaml,
    }
    kind = kinds.get(path.suffix)
    if kind is None:
        raise ConfigError(f"config: {str(path)!r} must end in .toml, .yaml or .yml")
    if not path.is_file():
        raise ConfigError(f"config: there is no file {str(path)!r}")
    settings = kind(path, use_commands_as_keys=False, must_exist=True).config
    return _source(tables_as_json(settings), str(path))


def _source(settings: Mapping[str, Any], name: str) -> Any:
    """Settings that hold for every command.

    One copy under each command's name: of flat ones Cyclopts silently ignores those that are called
    like a command, and ``runs`` is both.
    """
    return cyclopts.config.Dict(dict.fromkeys(app, settings), source=name)


def _resumed_settings(tokens: tuple[str, ...]) -> dict[str, Any]:
    """What the run to resume was started with; flags given now come before it."""
    for i, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        if name == "--resume" and (equals or i + 1 < len(tokens)):
            from agentrl.runs.folder import RunFolder

            folder = RunFolder.existing(Path(value if equals else tokens[i + 1]))
            settings = json.loads(folder.config.read_text(encoding="utf-8"))
            return tables_as_json({k: v for k, v in settings.items() if v is not None})
    return {}


def _cyclopts_message(error: CycloptsError) -> str:
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name = error.argument.name.lstrip("-").replace("-", "_")
        return f"{name}: is missing. {error.argument.parameter.help or ''}".rstrip()
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ValidationError):
            kinds = {
                k.__name__: k
                for k in (TrainSettings, EvalSettings, RunSettings, JoinSettings, ServeConfig)
            }
            return explain(cause, kinds.get(cause.title, TrainSettings))
        cause = cause.__cause__ or cause.__context__
    return str(error)


def _fail(message: str, code: int = 2) -> None:
    stderr.print(Panel(Text(message), title="error", title_align="left", border_style="red"))
    sys.exit(code)


if __name__ == "__main__":
    main()
