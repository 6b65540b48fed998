"""Dispatch the ``agentrl`` command line, and print errors.

A command's module is imported when it runs: ``agentrl --help`` loads no torch.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter

from agentrl import __version__
from agentrl.console.output import LogLines, print_error, print_line, stderr
from agentrl.interrupts import Interrupted, end_at_once, last_words

app = App(
    name="agentrl",
    help="Reinforcement learning for the agent you already have.",
    version=__version__,
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,
)
runs_app = App(name="runs", help="Look at earlier runs.")
_COMMANDS = {  # with settings: they read their own flags, see config/loading.py
    "train": "Train a LoRA adapter for an agent.",
    "check": "Try an agent and its tasks before a training: what works, what fits, what to expect.",
    "sweep": "Search for the best values of settings: each trial is a training run.",
    "eval": "Run an agent on tasks and count its successes.",
    "run": "Run an agent on one task and print its trace.",
    "serve": "Serve a model, with or without a trained adapter, over the OpenAI API.",
    "runner": "Run rollouts of a run in progress, from this or another machine.",
}
_OTHERS = {
    "ui": "Show runs in a browser: curves, rollouts, conversations and their tokens.",
    "report": "Write charts, evaluations and examples of a run as one HTML file to share.",
    "export": "Write a trained adapter as a PEFT folder or a merged model, for vLLM, Ollama and "
    "others.",
    "tinker-server": "Run scripts for Tinker's SDK on this machine: serve its protocol.",
}
_OWN_FLAGS: dict[str, Any] = {"help_flags": [], "version_flags": []}
for _name, _help in (_COMMANDS | _OTHERS).items():
    _module = _name.replace("-", "_")
    _own = _OWN_FLAGS if _name in _COMMANDS else {}
    app.command(f"agentrl.cli.{_module}:{_module}_command", name=_name, help=_help, **_own)
app.command(runs_app)
_RUNS = {
    "list": ("listing", "List the runs in a folder."),
    "show": ("listing", "Show a run: its steps, evaluations, and where its calls went."),
    "rollouts": ("rollouts", "List the rollouts of a run that match."),
    "rollout": ("rollouts", "Show the trace of one rollout."),
    "compare": ("comparing", "Compare runs: settings, curves, held-out success."),
    "calls": (
        "rollouts",
        "List the newest calls of a run, or those that were served.",
    ),
    "export": ("exporting", "Write rollouts as JSON lines, Parquet, chats or preference pairs."),
    "feedback": ("exporting", "Write the feedback of people as JSON lines."),
    "prune": ("pruning", "Delete what ended runs no longer need."),
    "verify": ("listing", "Count a run's calls one by one, and compare them with its sums."),
}
for _name, (_module, _help) in _RUNS.items():
    runs_app.command(f"agentrl.cli.runs.{_module}:{_name}_command", name=_name, help=_help)

app.register_install_completion_command(help="Complete commands and flags in this shell.")


def _keep_secrets(tokens: list[str]) -> None:
    """Let agents of this user read neither memory nor arguments of a command that has keys."""
    if tokens and tokens[0] in (*_COMMANDS, "tinker-server", "ui"):
        from agentrl.process_privacy import hide_arguments, hide_memory

        hide_memory()
        hide_arguments(tokens)


def main() -> None:
    """Run the command of ``sys.argv``.

    Exits with 2 on a wrong setting, 1 on a failure, and 130 or 143 when it is interrupted.
    """
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        handlers=[LogLines()],
    )
    tokens = sys.argv[1:]
    try:
        if sys.platform == "win32":
            raise ValueError("agentrl runs on Linux and macOS. On Windows, run it in WSL.")
        if tokens and tokens[0] in _COMMANDS and {"-h", "--help", "--help-all"} & {*tokens}:
            from agentrl.cli.help import print_help

            print_help(tokens[0], everything="--help-all" in tokens)
        else:
            _keep_secrets(tokens)
            app(tokens, exit_on_error=False, print_error=False)
    except Interrupted as ended:
        end_at_once(ended.code, f"ended by {ended}")  # a thread may compute for minutes yet
    except KeyboardInterrupt:
        sys.exit(130)
    except (CycloptsError, ValueError, RuntimeError, OSError) as error:  # ConfigError among them
        said = str(error)
        if isinstance(error, OSError) and error.strerror:  # a full disk, an unwritable folder
            said = f"{error.filename or 'a file or connection'}: {error.strerror}"
        if isinstance(error, MissingArgumentError) and error.argument is not None:
            name = error.argument.name.lstrip("-").replace("-", "_")
            said = f"{name}: is missing. {error.argument.parameter.help or ''}".rstrip()
        print_error(said)
        if words := last_words():
            print_line(words, to=stderr)
        sys.exit(1 if isinstance(error, RuntimeError | OSError) else 2)


if __name__ == "__main__":
    main()
