"""``agentrl export``: write a trained adapter for other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agentrl.console.output import console, print_line
from agentrl.interrupts import end_in_order


def export_command(
    source: Annotated[str, Parameter(help="A run folder, RUN@STEP, RUN@best, or a PEFT folder.")],
    out: Annotated[Path, Parameter(help="Folder to write; it must not exist.")],
    *,
    merged: Annotated[bool, Parameter(help="Merge the adapter into the base model.")] = False,
    model: Annotated[str | None, Parameter(help="Base model; by default the run's.")] = None,
    adapter: Annotated[str | None, Parameter(help="Which one, if a run has several.")] = None,
    trust_remote_code: Annotated[
        bool, Parameter(help="To merge, run the code that comes with the base model.")
    ] = False,
) -> None:
    """Write a trained adapter as a PEFT folder or a merged model, and print how to serve it."""
    from agentrl.export.adapter import export

    end_in_order()
    with console.status("merging" if merged else "copying"):
        exported = export(
            source, out, merged=merged, model=model, adapter=adapter,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    if exported.which:
        print_line(exported.which)
    kind = "model" if exported.merged else "adapter"
    print_line(f"{kind} written to {exported.folder}; use it with one of:")
    for server, commands in exported.servers.items():
        print_line((f"  {server}", "dim"))
        for command in commands:
            print_line((f"    {command}", "cyan"))
