"""Read records from a file or a dataset, each with the place that errors name.

JSONL, JSON, CSV and Parquet files, and Hugging Face datasets, by name or in a folder. Knows nothing
of what records mean.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from agentrl.config.errors import ConfigError
from agentrl_tracer.schemas import Json

_FILES = (".jsonl", ".json", ".csv", ".parquet")
_KINDS = "a .jsonl, .json, .csv or .parquet file, or the name of a Hugging Face dataset"


def load_tasks(source: str | Path, field: str) -> list[Json]:
    """Return the tasks in a file or dataset.

    Raises:
        ConfigError: as ``read_records``; or there are none.
    """
    tasks = [task for _, task in read_records(str(source), field)]
    if not tasks:
        raise ConfigError(f"{field}: {source} holds no tasks")
    return tasks


def read_records(source: str, field: str) -> list[tuple[str, Json]]:
    """Return the records in a file, or in a dataset: ``NAME``, ``NAME:SPLIT`` or a folder.

    Each is with its place: file and line (JSONL) or row, counted from 1. A file whose name says
    nothing of its kind is read as JSON lines.

    Args:
        field: the setting's name, for errors.

    Raises:
        ConfigError: names ``field``, the file and the line or row that cannot be read.
    """
    path = Path(source)
    try:
        is_file = path.is_file() or path.suffix in _FILES
        found = _of_file(path) if is_file else _of_dataset(source)
        return [(where, _checked(data, where)) for where, data in found]
    except OSError as error:
        raise ConfigError(f"{field}: cannot read {source!r}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from error


def _of_file(path: Path) -> Iterable[tuple[str, Any]]:
    if path.suffix == ".parquet":
        return _parquet(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if path.suffix == ".csv":
        return _csv(path, text)
    if path.suffix == ".json" and text.lstrip().startswith("["):
        rows: list[Any] = _json(text, str(path))
        return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]
    return [
        (where := f"{path}, line {number}", _json(line, where))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def _json(text: str, where: str) -> Any:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{where} is not JSON: it holds {name}; write null")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg}") from error


def _csv(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    lines = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for number, row in enumerate(lines, start=1):
            where = f"{path}, row {number}"
            if None in row or None in row.values():
                raise ValueError(f"{where} has not as many cells as the first line")
            yield where, {name: _cell(value) for name, value in row.items() if value}
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV: line {lines.line_num}: {error}") from error


def _cell(text: str) -> Any:
    """Read a cell as JSON if it is JSON, else as text."""
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def _parquet(path: Path) -> Iterable[tuple[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError("Parquet needs pyarrow: pip install pyarrow") from error
    try:
        rows: list[Any] = parquet.ParquetFile(path).read().to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not Parquet: {error}") from error
    return [(f"{path}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _of_dataset(source: str) -> Iterable[tuple[str, Any]]:
    name, _, split = source.partition(":")
    if not Path(name).is_dir() and (Path(name).suffix or name.startswith((".", "/", "~"))):
        raise ValueError(f"there is no {name!r}; give {_KINDS}")
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source!r} is no file; a dataset of Hugging Face needs: pip install datasets"
        ) from error
    saved = any((Path(name) / f"dataset_{one}.json").is_file() for one in ("info", "dict"))
    try:
        found: Any = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except Exception as error:  # of any of its readers
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"{source!r} cannot be loaded as a dataset: {said}") from error
    if isinstance(found, dict):
        chosen = split or "train"
        if chosen not in found:
            known = ", ".join(f"{name}:{one}" for one in found)
            raise ValueError(f"{name!r} has no split {chosen}; give {known}")
        found = found[chosen]
    return ((f"{source}, row {number}", row) for number, row in enumerate(found, start=1))


def _checked(data: Any, where: str) -> Json:
    if not isinstance(data, dict):
        said = 'give an object, like {"n": 1}'
        raise ValueError(f"{where} is a JSON {type(data).__name__}; {said}")
    for name, value in data.items():
        try:
            json.dumps(value, allow_nan=False)
        except TypeError as error:  # a date, or bytes
            raise ValueError(f"{where}: {name}: {error}; store it as text") from error
        except ValueError as error:
            raise ValueError(f"{where}: {name} holds NaN or an infinity; write null") from error
    return data
