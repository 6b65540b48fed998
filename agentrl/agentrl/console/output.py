"""The consoles that commands print to."""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

console = Console()
stderr = Console(stderr=True)


def print_error(message: str) -> None:
    stderr.print(Panel(Text(message), title="error", title_align="left", border_style="red"))


def print_line(text: str) -> None:
    """Print a line that users copy: not wrapped, and printed as it is."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
