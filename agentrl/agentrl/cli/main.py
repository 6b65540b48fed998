"""Dispatch the ``agentrl`` command line; print the help of commands with settings, and errors.

A command's module is imported when it runs: ``agentrl --help`` loads no torch.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from typing import Any

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter
from rich.table import Table

from agentrl import __version__
from agentrl.console.output import LogLines, console, print_block, print_error, print_line, stderr
from agentrl.interrupts import Interrupted, end_at_once, last_words

app = App(
    name="agentrl",
    help="Reinforcement learning for the agent you already have.",
    version=__version__,
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,
)
_COMMANDS = {  # with settings: they read their own flags, see config/loading.py
    "train": "Train a LoRA adapter for an agent.",
    "check": "Try an agent and its tasks before a training: what works, what fits, what to expect.",
    "sweep": "Search for the best values of settings: each trial is a training run.",
    "sft": "Train a LoRA adapter on chats, or on the good rollouts of a run.",
    "prefer": "Train a LoRA adapter on pairs of answers, one of which is preferred.",
    "reward-model": "Train a model that scores conversations, as a reward for a training.",
    "eval": "Run an agent on tasks and count its successes.",
    "run": "Run an agent on one task and print its trace.",
    "serve": "Serve a model, with or without a trained adapter, over the OpenAI API.",
    "inspect": "Run a task of inspect_ai with a model or a trained adapter.",
    "runner": "Run rollouts of a run in progress, from this or another machine.",
}
_OTHERS = {
    "ui": "Show runs in a browser: curves, rollouts, conversations and their tokens.",
    "report": "Write charts, evaluations and examples of a run as one HTML file to share.",
    "export": "Write a trained adapter as a PEFT folder or a merged model, for vLLM, Ollama and "
    "others.",
    "tinker-server": "Run scripts for Tinker's SDK on this machine: serve its protocol.",
}
_OFFLINE = ("sft", "prefer", "reward-model")
_SERVERS = ("serve", "ui", "tinker-server")
# Errors that may say it, by name: --help loads no torch.
_OF_MEMORY = {"OutOfMemoryError", "RuntimeError", "RankError", "MemoryError"}
_NO_MEMORY = re.compile(
    r"(?:\w+Error: )?(?:(\w[\w ]* out of memory)(?: \(.*?\))?(\. Tried to allocate [\d.]+ \w+)"
    r"|\[enforce fail.*(can't allocate memory: you tried to allocate \d+ bytes)).*"
    r"|(MemoryError)"
)
"""What is said of a GPU, of MPS, and of a CPU, by torch and by Python."""
_LESS_MEMORY = (
    "Lower learning.micro_batch_tokens, set learning.gradient_checkpointing, or take a smaller "
    "model; agentrl check estimates what each part takes."
)
_OWN_FLAGS: dict[str, Any] = {"help_flags": [], "version_flags": []}
_HELP_OF_FLAGS = {
    "--config": "TOML or YAML file of settings.",
    "--resume": "Run to continue, or RUN@STEP, RUN@best; other flags win over its own.",
    "--help-all": "Show all settings: each is also a key of a file and an environment variable.",
}


def _place_of(command: str) -> str:
    """Return where the function of a command is, as ``module:function``."""
    name = command.replace("-", "_")
    module = "offline" if command in _OFFLINE else name
    folder = "servers." if command in _SERVERS else ""
    return f"agentrl.cli.{folder}{module}:{name}_command"


for _name, _help in (_COMMANDS | _OTHERS).items():
    _own = _OWN_FLAGS if _name in _COMMANDS else {}
    app.command(_place_of(_name), name=_name, help=_help, **_own)
app.command("agentrl.cli.runs:runs_app", name="runs", help="Look at earlier runs.")

app.register_install_completion_command(help="Complete commands and flags in this shell.")


def _keep_secrets(tokens: list[str]) -> None:
    """Let agents of this user read neither memory nor arguments of a command that has keys."""
    if tokens and tokens[0] in (*_COMMANDS, "tinker-server", "ui"):
        from agentrl.process_privacy import hide_arguments, hide_memory

        hide_memory()
        hide_arguments(tokens)


def _print_help(name: str, *, everything: bool) -> None:
    """Print what a command does and its flags: the short ones, or all of them."""
    from agentrl.config.commands import COMMANDS, is_resumable
    from agentrl.config.setting_names import settings_of

    command = COMMANDS[name]
    module, _, function = _place_of(name).partition(":")
    word, argument = command.argument
    agent = f"{word} " if argument.partition(".")[0] in command.model_fields else ""
    description = inspect.getdoc(getattr(importlib.import_module(module), function)) or ""
    for paragraph in (f"Usage: agentrl {name} {agent}[FLAGS]", *description.split("\n\n")):
        console.print(" ".join(paragraph.split()) + "\n", markup=False, highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="cyan", min_width=22)
    table.add_column(overflow="fold")
    known = {setting.name: setting for setting in settings_of(command)}
    if agent:
        table.add_row(word, known[argument].meaning)
    for setting in map(known.__getitem__, known if everything else command.short_flags):
        if setting.flags:
            default = rf"\[{setting.default}] " if setting.default else ""
            said = setting.meaning if everything else setting.meaning.partition(". ")[0]
            meaning = default + said.rstrip(".").replace("[", r"\[") + "."
            table.add_row(setting.flags[: 1 if everything else 2][-1], meaning)
    for flag, meaning in _HELP_OF_FLAGS.items():
        if flag != "--resume" or is_resumable(command):
            table.add_row(flag, meaning)
    print_block(table)


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
            _print_help(tokens[0], everything="--help-all" in tokens)
        else:
            _keep_secrets(tokens)
            app(tokens, exit_on_error=False, print_error=False)
    except Interrupted as ended:
        end_at_once(ended.code, f"ended by {ended}")  # a thread may compute for minutes yet
    except KeyboardInterrupt:
        sys.exit(130)
    except (CycloptsError, ValueError, RuntimeError, OSError, MemoryError) as error:
        said = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:  # a full disk, an unwritable folder
            said = f"{error.filename or 'a file or connection'}: {error.strerror}"
        if {type(one).__name__ for one in (error, error.__cause__)} & _OF_MEMORY:
            said, without_memory = _NO_MEMORY.subn(r"\1\2\3\4.", said)
            said += f"\n{_LESS_MEMORY}" if without_memory else ""
        if isinstance(error, MissingArgumentError) and error.argument is not None:
            name = error.argument.name.lstrip("-").replace("-", "_")
            said = f"{name}: is missing. {error.argument.parameter.help or ''}".rstrip()
        print_error(said)
        if words := last_words():
            print_line(words, to=stderr)
        sys.exit(1 if isinstance(error, RuntimeError | OSError | MemoryError) else 2)


if __name__ == "__main__":
    main()
