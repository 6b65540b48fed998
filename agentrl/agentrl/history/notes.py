"""Tags, a note and the archived flag that a user gives a run: ``notes.json`` in its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder

_MOST_TAGS, _LONGEST_TAG, _LONGEST_NOTE = 20, 40, 20_000


@dataclass(frozen=True, slots=True)
class Notes:
    tags: tuple[str, ...] = ()
    note: str = ""
    """Markdown."""
    archived: bool = False


def read_notes(folder: RunFolder) -> Notes:
    """Return the notes of a run.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder.root / "notes.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Notes(tuple(map(str, found["tags"])), str(found["note"]), bool(found["archived"]))
    except FileNotFoundError:
        return Notes()
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged; correct or delete it: {error}") from error


def write_notes(
    folder: RunFolder, *, tags: str | None = None, note: str | None = None,
    archived: bool | None = None,
) -> Notes:  # fmt: skip
    """Change what is given, as a whole or not at all; return the notes as they are now.

    Args:
        tags: separated by commas.

    Raises:
        ConfigError: a tag or the note is too long, or the file is damaged.
        OSError: the folder cannot be written.
    """
    notes = read_notes(folder)
    if tags is not None:
        listed = tuple(dict.fromkeys(filter(None, map(str.strip, tags.split(",")))))
        if len(listed) > _MOST_TAGS or any(len(tag) > _LONGEST_TAG for tag in listed):
            raise ConfigError(f"tags: at most {_MOST_TAGS}, each of {_LONGEST_TAG} characters")
        notes = replace(notes, tags=listed)
    if note is not None:
        if len(note) > _LONGEST_NOTE:
            raise ConfigError(f"note: {len(note):,} characters; at most {_LONGEST_NOTE:,}")
        notes = replace(notes, note=note.replace("\r\n", "\n").strip())
    if archived is not None:
        notes = replace(notes, archived=archived)
    folder.write_json(folder.root / "notes.json", asdict(notes))
    return notes
