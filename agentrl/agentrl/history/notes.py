"""Tags, a note and the archived flag that a user gives a run: ``notes.json`` in its folder."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from agentrl.config.errors import ConfigError
from agentrl.runs.folder import RunFolder


def _split(tags: Any) -> Any:
    """Return a text's tags, which are separated by commas, each once."""
    if not isinstance(tags, str):
        return tags
    return tuple(dict.fromkeys(filter(None, map(str.strip, tags.split(",")))))


_LINES = AfterValidator(lambda text: text.replace("\r\n", "\n"))  # of browsers
_Tag = Annotated[str, Field(max_length=40)]


@dataclass(frozen=True)
class Notes:
    tags: Annotated[tuple[_Tag, ...], Field(max_length=20), BeforeValidator(_split)] = ()
    note: Annotated[str, StringConstraints(strip_whitespace=True, max_length=20_000), _LINES] = ""
    """Markdown."""
    archived: bool = False


_NOTES = TypeAdapter(Notes)


def read_notes(folder: RunFolder) -> Notes:
    """Return the notes of a run.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder.root / "notes.json"
    try:
        return _NOTES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return Notes()
    except ValidationError as error:
        raise ConfigError(f"{path} is damaged; correct or delete it: {_first(error)}") from error


def write_notes(folder: RunFolder, **changes: Any) -> Notes:
    """Change the fields that are given and not None; return the notes as they are now.

    Raises:
        ConfigError: a tag or the note is too long, or the file is damaged.
        OSError: the folder cannot be written.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    try:
        notes = Notes(**asdict(read_notes(folder)) | given)
    except ValidationError as error:
        raise ConfigError(_first(error)) from error
    folder.write_json(folder.root / "notes.json", asdict(notes))
    return notes


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{problem['loc'][0] if problem['loc'] else 'file'}: {problem['msg']}"
