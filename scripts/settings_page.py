"""Write docs/settings.md from the models of the settings. ``python scripts/settings_page.py``"""

from __future__ import annotations

from pathlib import Path

from agentrl.config.commands import COMMANDS
from agentrl.config.setting_names import Setting, settings_of

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

_HEAD = """\
# Settings

<!-- Written by scripts/settings_page.py; change agentrl/agentrl/config/settings/ instead. -->

A setting has one name, in three spellings:

| Where | Spelling |
|---|---|
| flag | `--rollouts.group-size 8`; some have a short flag too: `--group-size 8` |
| environment variable | `AGENTRL_ROLLOUTS__GROUP_SIZE=8` |
| file, given with `--config` | `[rollouts]`, `group_size = 8` in TOML; the same in YAML |

Flags win over the environment, the environment over the file, and the file over the settings of a
run that `--resume` continues. Relative paths are relative to the working directory. In a flag
and a variable a table is JSON, and a list is JSON or its items with commas. `agentrl train --help`
shows the short flags, `--help-all` all settings.

`AGENTRL_MODEL`, `AGENTRL_CONTEXT_LENGTH`, `AGENTRL_GATEWAY` and `AGENTRL_TASK` are set for
agents. They are no settings.

A loss or an estimator has its options in a table of its name, such as `[algorithm.ppo]`. Options
of a loss or an estimator that is not chosen are refused. So is a name that no setting has; the
error says the nearest one.
"""


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    shown: dict[str, str | None] = {}
    for command, model in COMMANDS.items():
        new = [one for one in settings_of(model) if shown.get(one.name, "no such") != one.default]
        shown |= {one.name: one.default for one in settings_of(model)}
        title = f"`agentrl {command}`" if command == "train" else f"Only in `agentrl {command}`"
        parts.append(f"## {title}\n")
        parts.append(_table(new))
    return "\n".join(parts)


def _table(settings: list[Setting]) -> str:
    rows = ["| Setting | Default | Meaning | Flags and variable |", "|---|---|---|---|"]
    for one in settings:
        spelled = "<br>".join(f"`{name}`" for name in [*one.flags, one.variable])
        default = f"`{one.default}`" if one.default else ""
        default = "required" if one.field.is_required() else default
        meaning = one.meaning.replace("|", "\\|")
        rows.append(f"| `{one.name}` | {default} | {meaning} | {spelled} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
