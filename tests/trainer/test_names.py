"""Names that become files and folders stay in their folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from client_data import TINY

from agentrl_trainer.client import ServiceClient
from agentrl_trainer.names import check_name

BAD: list[Any] = [
    "..", ".", "", "a/b", "/a", "a\\b", "a\0", "a\n", "-a", ".a", "a.", "a b", "a@3", "~", "é",
    "\uff0e\uff0e", "a" * 101, 7, None,
]  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_is_no_folder_of_its_own_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"path: got .*, but a name has 1 to 100 of the letters"):
        check_name(name, "path")


@pytest.mark.parametrize("name", ["a", "Qwen2.5_7b-it", "0001", "_x", "a..b", "a" * 100])
def test_ordinary_names_are_taken(name: str) -> None:
    assert check_name(name) == name


def test_a_name_without_dots() -> None:
    with pytest.raises(ValueError, match=r"not first, '-'$"):
        check_name("a.b", dots=False)


def test_clients_and_saved_states_have_such_names(tmp_path: Path) -> None:
    with ServiceClient(folder=tmp_path / "in") as service:
        for name in ("..", "a/b", "a.b"):
            with pytest.raises(ValueError, match="name: got"):
                service.create_lora_training_client(TINY, 2, name=name)
        client = service.create_lora_training_client(TINY, 2)
        for name in ("..", "../../out", "/out", ""):
            with pytest.raises(ValueError, match="name: got"):
                client.save_state(name)
            with pytest.raises(ValueError, match="name: got"):
                client.save_weights_for_sampler(name)


def test_a_client_over_tinker_has_such_a_name(tmp_path: Path) -> None:
    """Its own, or the one that the service gave to the model."""
    clients = pytest.importorskip("agentrl_trainer.client.tinker.clients")
    service = SimpleNamespace(folder=tmp_path, responses=SimpleNamespace(start=None))

    def named(name: str | None, model_id: str) -> Any:
        model = SimpleNamespace(get_info=lambda: SimpleNamespace(model_id=model_id))
        return clients.TinkerTrainingClient(service, model, name).folder

    assert named(None, "uuid:train:0") == tmp_path / "uuid-train-0"
    for name, model_id in (("..", "m"), (None, "../../m")):
        with pytest.raises(ValueError, match="name: got"):
            named(name, model_id)
