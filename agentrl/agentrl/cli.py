"""The command line. Knows how to read it and what to print; the work is done elsewhere.

Heavy modules are imported inside the commands: ``agentrl --help`` must not load torch.
"""

from __future__ import annotations

import json
import logging
import sys
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
from agentrl.config import (
    AGENT_HELP,
    ConfigError,
    EvalConfig,
    EvalSettings,
    ServeConfig,
    TrainConfig,
    TrainSettings,
    explain,
    tables_as_json,
)
from agentrl.imports import heavy_imports

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
    """
    from agentrl.display import TrainDisplay
    from agentrl.report import serve_command, training_report
    from agentrl.run_folder import RunFolder
    from agentrl.runner import validate_agent
    from agentrl.session import Session
    from agentrl.tasks import load_tasks

    config = _with_agent(TrainConfig, agent, settings)
    validate_agent(config.agent)
    tasks = load_tasks(config.tasks, "tasks")
    eval_tasks = load_tasks(config.eval_tasks, "eval_tasks") if config.eval_tasks else []
    if resume is not None:
        folder = RunFolder.existing(resume)
    else:
        folder = RunFolder.create(config.runs, config.name, "train")
    console.print(f"[dim]run folder {folder.root}[/]", soft_wrap=True)
    console.print("[dim]loading torch, the gateway and the runners[/]")
    with (
        Session(folder, config, "train", imports_torch=True) as session,
        # After the session: it has a thread, and the session may fork.
        TrainDisplay(console, f"agentrl · {folder.name}") as display,
    ):
        with heavy_imports():
            from agentrl.train import Training

        summary = Training(config, tasks, eval_tasks, session, display).run()
    console.print(training_report(summary))
    # Outside the panel: a line to copy must not be wrapped into a frame.
    console.print(f"serve it:  [b cyan]{serve_command(summary, config.model)}[/]", soft_wrap=True)


@app.command(name="eval")
def evaluate(agent: Agent = None, *, settings: EvalSettings) -> None:
    """Run an agent on tasks and count its successes."""
    from agentrl.evaluate import evaluate as run_evaluation
    from agentrl.runner import validate_agent

    config = _with_agent(EvalConfig, agent, settings)
    validate_agent(config.agent)
    run_evaluation(config, console)


@app.command
def serve(*, settings: ServeConfig | None = None) -> None:
    """Serve a model, with or without a trained adapter, over the OpenAI API."""
    settings = settings or ServeConfig()  # pyright: ignore[reportCallIssue]
    from agentrl.gateway import GatewaySettings, run_gateway
    from agentrl_proxy.server import bind, url_of

    try:
        sock = bind(settings.host, settings.port, operator_key=settings.operator_key)
    except (ValueError, OSError) as error:
        raise ConfigError(f"host/port: {error}") from error
    url = url_of(sock)
    name = settings.adapter if settings.adapter_path else settings.model
    console.print(f"[b]{name}[/] answers at [b cyan]{url}/v1[/] once the model is loaded. Try:\n")
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
    run_gateway(
        GatewaySettings(
            store=settings.store,
            model=settings.model,
            adapter=settings.adapter if settings.adapter_path else None,
            device=settings.device,
            dtype=settings.dtype,
            operator_key=settings.operator_key,
            run_id=None,
            max_tokens=settings.max_tokens,
            models=settings.model_dump(mode="json")["models"],
            adapter_path=str(settings.adapter_path) if settings.adapter_path else None,
            **settings.gateway_limits(),
        ),
        sock,
    )


@runs_app.command(name="list")
def list_runs(
    runs: Annotated[Path, Parameter(help="Folder of run folders.")] = Path("runs"),
) -> None:
    """List the runs in a folder."""
    from agentrl.report import runs_table
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
def show_run(run: Annotated[Path, Parameter(help="Run folder, for instance runs/hello.")]) -> None:
    """Show one run: its steps, and where its calls went."""
    from agentrl.report import show_run as show
    from agentrl.run_folder import RunFolder
    from agentrl_tracer.store import Store

    folder = RunFolder.existing(run)
    settings = json.loads(folder.config.read_text(encoding="utf-8"))
    store = Store(settings.get("store") or str(folder.store))
    run_id = folder.run_id.read_text().strip()
    row = next(r for r in store.runs() if r["id"] == run_id)
    metrics, sums = store.metrics(run_id), store.accounting(run_id)
    show(console, row, metrics, sums, store.continuity(run_id))
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
        sources.append(cyclopts.config.Dict(resumed, use_commands_as_keys=False, source="resume"))
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
    return cyclopts.config.Dict(
        tables_as_json(settings), use_commands_as_keys=False, source=str(path)
    )


def _resumed_settings(tokens: tuple[str, ...]) -> dict[str, Any]:
    """What the run to resume was started with; flags given now come before it."""
    for i, token in enumerate(tokens):
        name, equals, value = token.partition("=")
        if name == "--resume" and (equals or i + 1 < len(tokens)):
            from agentrl.run_folder import RunFolder

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
            kinds = {k.__name__: k for k in (TrainSettings, EvalSettings, ServeConfig)}
            return explain(cause, kinds.get(cause.title, TrainSettings))
        cause = cause.__cause__ or cause.__context__
    return str(error)


def _fail(message: str, code: int = 2) -> None:
    stderr.print(Panel(Text(message), title="error", title_align="left", border_style="red"))
    sys.exit(code)


if __name__ == "__main__":
    main()
