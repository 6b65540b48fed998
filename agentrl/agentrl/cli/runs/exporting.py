"""``agentrl runs export``: write rollouts for other programs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from agentrl.cli.runs.opening import RunPath, Where, indexed_run
from agentrl.config.errors import ConfigError
from agentrl.console.output import print_json, print_line, stderr
from agentrl.history.export import chat_records, pair_records, rollout_records
from agentrl.history.index import COLUMNS
from agentrl.history.sources import Sources
from agentrl_tracer.schemas import Json

_RECORDS = {
    "jsonl": rollout_records,
    "parquet": rollout_records,
    "sft": chat_records,
    "pairs": pair_records,
}
_ROW_GROUP = 500


def export_command(
    run: RunPath,
    *,
    format: Annotated[
        Literal["jsonl", "parquet", "sft", "pairs"],
        Parameter(
            help="jsonl and parquet: rollouts with their calls; sft: OpenAI chat messages of the "
            "successful ones; pairs: best against worst of each group."
        ),
    ] = "jsonl",
    where: Where = "",
    output: Annotated[Path | None, Parameter(help="File; by default the output.")] = None,
) -> None:
    """Write rollouts as JSON lines, Parquet, chats or preference pairs."""
    if format == "parquet" and output is None:
        raise ConfigError("output: parquet needs a file, for instance --output rollouts.parquet")
    with indexed_run(run) as opened, contextlib.ExitStack() as stack:
        records = _RECORDS[format](opened, where)
        if format == "parquet":
            written = _write_parquet(records, str(output))
        else:
            if output is not None:
                file = stack.enter_context(output.open("w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(file))
            written = sum(print_json(record) is None for record in records)
    if output is not None or not written:
        print_line(f"{written:,} records" + (f" in {output}" if output else ""), to=stderr)


def feedback_command(
    run: Annotated[Path, Parameter(help="Run folder, or a file of `agentrl serve`.")],
) -> None:
    """Write the feedback of people on a run, or on served calls, as JSON lines."""
    sources = Sources(run.absolute().parent)
    with contextlib.closing(sources):
        opened = sources.served(run.name) if run.is_file() else sources.open(run.name)
        for one in opened.store.feedback(opened.id):
            print_json(asdict(one))


def _write_parquet(records: Iterable[Json], path: str) -> int:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError("format: parquet needs pyarrow: pip install pyarrow") from error
    kinds: dict[str, Any] = {"TEXT": pa.string(), "INTEGER": pa.int64(), "REAL": pa.float64()}
    columns = {name: kinds[kind.split()[0]] for name, kind in COLUMNS.items()}
    schema = pa.schema(columns | dict.fromkeys(("split", "data", "calls"), pa.string()))
    written, waiting = 0, iter(records)
    with parquet.ParquetWriter(path, schema) as writer:
        while batch := [_as_texts(record) for record in islice(waiting, _ROW_GROUP)]:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            written += len(batch)
    return written


def _as_texts(record: Json) -> Json:
    """Write what has no column type of its own as JSON."""
    return {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
        for name, value in record.items()
    }
