"""Records come from every kind of file alike, and what cannot be read is named by its place."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from agentrl.config.errors import ConfigError
from agentrl.datasets.files import load_tasks, read_records

RECORDS: list[dict[str, Any]] = [{"n": 1, "say": 'a, "b"\nc\u2028d'}, {"n": 20, "say": "01"}]


def as_jsonl(path: Path) -> str:
    lines = [json.dumps(one, ensure_ascii=False) for one in RECORDS]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def as_json(path: Path) -> str:
    path.write_text(json.dumps(RECORDS, indent=1))
    return str(path)


def as_csv(path: Path) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["n", "say", "nothing"])
        writer.writeheader()
        writer.writerows(RECORDS)
    return str(path)


def as_parquet(path: Path) -> str:
    parquet.write_table(pa.Table.from_pylist(RECORDS), path)
    return str(path)


def as_dataset(path: Path) -> str:
    known = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict({"good": known, "train": known.select([0])}).save_to_disk(path)
    return f"{path}:good"


@pytest.mark.parametrize(
    ("write", "name", "place"),
    [
        (as_jsonl, "a.jsonl", "line 3"),
        (as_jsonl, "tasks", "line 3"),
        (as_jsonl, "a.json", "line 3"),
        (as_json, "a.json", "row 2"),
        (as_csv, "a.csv", "row 2"),
        (as_parquet, "a.parquet", "row 2"),
        (as_dataset, "saved", "row 2"),
    ],
)
def test_every_kind_gives_the_same_records_and_their_places(
    write: Callable[[Path], str], name: str, place: str, tmp_path: Path
) -> None:
    source = write(tmp_path / name)
    found = read_records(source, "data")
    assert [data for _, data in found] == RECORDS
    assert found[1][0] == f"{source}, {place}"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"n": 1}\n[2]\n', r"tasks: .*a.jsonl, line 2 is a JSON list; give an object"),
        ("a.jsonl", '{"n": 1\n', "line 1 is not JSON"),
        ("a.jsonl", '{"n": NaN}\n', "line 1 is not JSON: it holds NaN"),
        ("a.jsonl", "\n", "holds no tasks"),
        ("a.json", '[{"n": 1}, 2]', "a.json, row 2 is a JSON int"),
        ("a.csv", "n,m\n1\n", "a.csv, row 1 has not as many cells as the first line"),
        ("a.csv", 'n\n"1\n', "a.csv is not CSV: line .*unexpected end"),
        ("a.parquet", "PAR", "a.parquet is not Parquet"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_tasks(tmp_path / name, "tasks")


def test_no_number_in_parquet_is_named(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist([{"n": float("nan")}]), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet, row 1: n holds NaN .* null"):
        load_tasks(tmp_path / "a.parquet", "tasks")


def test_a_source_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = as_dataset(tmp_path / "saved").removesuffix(":good")
    assert len(read_records(source, "data")) == 1  # its split named train
    for missing, message in (
        (f"{source}:best", "data: .* has no split best; give .*:good, .*:train"),
        (str(tmp_path / "no.jsonl"), "data: cannot read .*no.jsonl.*No such file"),
        (str(tmp_path / "none"), "data: there is no .*none'; give a .jsonl"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_records(missing, "data")
    at = tmp_path / "dates.parquet"
    parquet.write_table(pa.Table.from_pylist([{"day": date(2026, 11, 27)}]), at)
    with pytest.raises(ConfigError, match=r"row 1: day: .*date is not JSON.*; store it as text"):
        read_records(str(at), "data")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"data: 'org/chats' is no file; .* pip install datasets"):
        read_records("org/chats", "data")
