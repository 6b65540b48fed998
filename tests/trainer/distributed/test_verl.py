"""verl's workers compute what one learner computes. On CPUs, by verl's own plug-in point."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked_rows import ADAM, MODEL, TINY, distance, groups
from small_models import qwen3, save_model
from verl_on_cpu import ENVIRONMENT

from agentrl_trainer.client import ServiceClient
from agentrl_trainer.data.training_row import TrainingRow, with_extra
from agentrl_trainer.learner.learner import Learner
from agentrl_trainer.learner.prepare_batch import RefusedRows
from agentrl_trainer.models.loading import load_base
from agentrl_trainer.models.sources import ModelError

if find_spec("verl") is None:
    pytest.skip("make verl", allow_module_level=True)
os.environ |= ENVIRONMENT  # verl reads it when it is imported

import ray  # pyright: ignore[reportMissingImports]
from ray.util import placement_group_table  # pyright: ignore[reportMissingImports]

from agentrl_trainer.distributed import on_ray
from agentrl_trainer.distributed.plan import RankError
from agentrl_trainer.distributed.verl.learner import VerlLearner, VerlTrainers
from agentrl_trainer.distributed.verl.probe import wrong_gradient

pytestmark = [
    pytest.mark.verl,
    pytest.mark.timeout(300),
]
TWO: dict[str, Any] = {"adapters": ("a", "b"), "rank": 8, "seed": 1}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(address="local", include_dashboard=False, num_cpus=8, log_to_driver=False)
    yield
    ray.shutdown()


def learner_over(workers: VerlTrainers, options: dict[str, Any]) -> VerlLearner:
    return workers.learner(workers.load(lambda load: load()), options)


@pytest.fixture(scope="module", params=[1, 3])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Learner, VerlLearner]]:
    """A learner, and one on verl's workers. Tests do the same with both."""
    torch.set_num_threads(1)
    workers = VerlTrainers(TINY, MODEL, request.param)
    options = TWO | {"token_budget": 100}
    yield Learner(load_base(TINY, **MODEL), **options), learner_over(workers, options)
    workers.end()


def rows_of(seed: int) -> list[TrainingRow]:
    """Rows of two adapters, some of which were sampled at another temperature."""
    rows = groups(seed, count=3)[:-1]
    warm = [[0.7] * len(row.tokens) for row in rows[:3]]
    return [*with_extra(rows[:3], temperature=warm), *rows[3:]]


def apart(one: list[list[float]], other: list[list[float]]) -> float:
    pairs = ((a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
    return max(abs(a - b) for a, b in pairs)


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("ppo", {"kl_coef": 0.1}),
        ("gspo", {"correction": "truncate"}),
        ("importance_sampling", {}),
    ],
)
def test_steps_are_those_of_one_learner(
    both: tuple[Learner, VerlLearner], loss: str, config: dict[str, Any]
) -> None:
    stats, filled = list[Any](), list[list[list[float]]]()
    for of in both:
        for seed in range(2):
            rows = of.with_reference(of.with_proximal(of.with_temperature(rows_of(seed))))
            into = [[0.0] * len(row.tokens) for row in rows]
            stats.append(of.forward_backward(rows, loss, config, None, into))
            filled.append(into)
            assert not of.optim_step(ADAM).skipped_non_finite
    for one, other in zip(stats[:2], stats[2:], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.max_logprob_difference == pytest.approx(other.max_logprob_difference, rel=1e-4)
        assert one.metrics == pytest.approx(other.metrics, rel=1e-3, abs=1e-6)
        assert (one.tokens, one.tokens_total) == (other.tokens, other.tokens_total)
    assert apart(filled[0], filled[2]) < 1e-4
    assert distance(*both) < 1e-5


def test_a_custom_loss_and_a_forward_pass(both: tuple[Learner, VerlLearner]) -> None:
    def loss(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum(row.square().sum() for row in logprobs) * 1e-3, {"mine": 1.0}  # type: ignore

    found = [of.forward_backward_custom(rows_of(4), loss) for of in both]
    norms = [of.optim_step(ADAM).grad_norm for of in both]
    assert found[0][0].loss == pytest.approx(found[1][0].loss, rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    asked = [of.forward_backward(rows_of(5), "dro", backward=False).loss for of in both]
    assert asked[0] == pytest.approx(asked[1], rel=1e-5)
    assert apart(*(of.forward(rows_of(5)) for of in both)) < 1e-4


def test_rows_that_are_not_finite_are_found(both: tuple[Learner, VerlLearner]) -> None:
    rows, (_, verl) = rows_of(6), both
    rows[1] = replace(rows[1], advantages=[float("nan")] * len(rows[1].tokens))
    before = verl.state_dict()
    assert verl.forward_backward(rows, "ppo").skipped_non_finite
    assert verl.optim_step().skipped_non_finite
    assert verl.finite_rows(rows, "ppo") == [0, *range(2, len(rows))]
    assert all(torch.equal(before[key], now) for key, now in verl.state_dict().items())


def test_the_gradient_is_that_of_the_loss(both: tuple[Learner, VerlLearner]) -> None:
    _, verl = both
    before = verl.state_dict()
    assert wrong_gradient(verl, "b") is None
    assert all(torch.equal(before[key], now) for key, now in verl.state_dict().items())


@pytest.mark.parametrize(
    ("size", "engine", "of_model", "options"),
    [
        (1, {}, {"use_remove_padding": False}, {}),
        (4, {"fsdp_size": 2}, {}, {}),  # HSDP: the base model twice
        (2, {"param_offload": True, "reshard_after_forward": False}, {}, {}),
        (1, {}, {}, {"gradient_checkpointing": True}),
    ],
    ids=["padded", "hsdp", "offloaded", "recomputed"],
)
def test_verls_own_settings_change_no_result(
    size: int, engine: dict[str, Any], of_model: dict[str, Any], options: dict[str, Any]
) -> None:
    workers = VerlTrainers(TINY, MODEL, size, engine=engine, of_model=of_model)
    verl = learner_over(workers, TWO | options)
    one = Learner(load_base(TINY, **MODEL), **TWO)
    for seed in range(2):
        before = [of.forward(rows_of(seed)) for of in (one, verl)]
        assert apart(*before) < 1e-4
        for of in (one, verl):
            of.forward_backward(rows_of(seed), "ppo")
            of.optim_step(ADAM)
    assert apart(*(of.forward(rows_of(2)) for of in (one, verl))) < 1e-4
    assert distance(one, verl) < 1e-5
    workers.end()


@pytest.mark.parametrize("again", [False, True])
def test_training_computes_without_dropout_and_in_half_precision(
    tmp_path: Path, again: bool
) -> None:
    def in_training(worker: Any) -> set[str]:
        with worker.engine.train_mode():
            modules = worker.engine.module.modules()
            return {type(one).__name__.removeprefix("FSDP") for one in modules if one.training}

    model = qwen3()
    model.config.attention_dropout = 0.5
    save_model(model, tmp_path)
    workers = VerlTrainers(str(tmp_path), {"device": "cpu", "dtype": "bfloat16"})
    verl, rows = learner_over(workers, TWO | {"gradient_checkpointing": again}), rows_of(3)
    into = [[0.0] * len(row.tokens) for row in rows]
    verl.forward_backward(rows, "ppo", logprobs_into=into)
    assert apart(into, verl.forward(rows)) < 1e-4
    verl.discard_gradients()
    assert wrong_gradient(verl, "a") is None
    [trained] = ray.get([one.__ray_call__.remote(in_training) for one in workers._group.workers])
    assert trained == ({"Qwen3DecoderLayer"} if again else set())
    workers.end()


def test_a_client_resumes_bit_for_bit_and_others_are_started_for_a_dead_worker(
    tmp_path: Path,
) -> None:
    """The same checkpoint goes on in this process, too."""

    def steps(training: Any, seeds: range) -> dict[str, torch.Tensor]:
        for seed in seeds:
            rows = groups(seed, adapters=("policy",))
            training.forward_backward(rows, "ppo", None).result()
            training.optim_step(ADAM).result()
        return training.local(lambda learner: learner.state_dict()).result()

    def client(backend: Any, **options: Any) -> tuple[ServiceClient, Any]:
        service = ServiceClient(backend=backend, folder=tmp_path, **MODEL, **options)
        return service, service.create_lora_training_client(TINY, 4, seed=3, name="policy")

    service, training = client("verl", trainers={"size": 2})
    with service:
        steps(training, range(2))
        service.save_checkpoint(tmp_path / "saved", 2).result()
        whole = steps(training, range(2, 4))
        workers = training.local(lambda learner: learner._workers._group.workers).result()
        pid = ray.get(workers[1].__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"a worker of verl failed: .*died"):
            training.forward(groups(0, adapters=("policy",))).result()
        assert service.restore_checkpoint(tmp_path / "saved").result().checkpoint
        again = steps(training, range(2, 4))
        assert all(torch.equal(whole[key], again[key]) for key in whole)
    service, training = client("local")
    with service:
        assert service.restore_checkpoint(tmp_path / "saved").result().checkpoint
        here = steps(training, range(2, 4))
    for key, value in whole.items():
        torch.testing.assert_close(here[key], value, rtol=1e-3, atol=1e-4, msg=key)


def test_what_verl_cannot_do_is_refused(
    both: tuple[Learner, VerlLearner], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="load_in_4bit"):
        VerlTrainers(TINY, MODEL | {"load_in_4bit": True})
    with pytest.raises(ValueError, match=r"verl\.engine\.strategy: 'megatron' .* use fsdp2"):
        VerlTrainers(TINY, MODEL, engine={"strategy": "megatron"})
    with pytest.raises(ValueError, match=r"verl\.nodes: 3 learning\.trainers do not fill 2 alike"):
        VerlTrainers(TINY, MODEL, 3, nodes=2)
    with pytest.raises(ValueError, match="no value functions"):
        learner_over(VerlTrainers(TINY, MODEL), {"value": 1})
    with pytest.raises(ValueError, match="trains in bfloat16 or float32"):
        VerlTrainers(TINY, MODEL | {"dtype": "float16"})
    odd = learner_over(VerlTrainers(TINY, MODEL, engine={"shards": 2}), TWO)
    with pytest.raises(ValueError, match=r"verl\.engine: verl refuses it: .*'shards'"):
        odd.forward(rows_of(1))
    monkeypatch.setattr(on_ray, "_PLACE_S", 1)
    with pytest.raises(RankError, match=r"no place for 9 trainers, 9 of them on one node"):
        learner_over(VerlTrainers(TINY, MODEL, 9), TWO).forward(rows_of(1))
    none = learner_over(VerlTrainers(TINY, MODEL, of_model={"layers": 2}), TWO)
    with pytest.raises(ValueError, match=r"verl\.model: verl refuses it: "):
        none.forward(rows_of(1))
    _, verl = both
    places = [one for one in placement_group_table().values() if one["state"] != "REMOVED"]
    assert len(places) == verl._workers.running
    with pytest.raises(ValueError, match="there is no adapter 'typo'"):
        verl.with_reference(rows_of(1), "typo")
    with pytest.raises(ValueError, match="all adapters need one r; the first one's is 8"):
        verl.add_adapter("c", rank=4)
    [row, *_] = groups(1)
    mixed = replace(row, extra={"temperature": [0.5, *[1.0] * (len(row.tokens) - 2), 0.7]})
    with pytest.raises(RefusedRows, match=r"one has \[0\.7, 1\.0\]"):
        verl.with_temperature([mixed])
    with pytest.raises(ValueError, match="kl_coef needs the reference's log-probs"):
        verl.forward_backward([row], "ppo", {"kl_coef": 0.1})
    assert verl._workers.running
    with pytest.raises(ValueError, match="some rows have 'proximal'"):
        verl.forward_backward([row, *verl.with_proximal([row])], "ppo")


def test_a_reference_adapter_is_computed_with(
    both: tuple[Learner, VerlLearner], tmp_path: Path
) -> None:
    both[0].save("a", tmp_path / "a")
    for of in both:
        of.add_reference("kept", tmp_path / "a")
    rows = rows_of(8)
    found = [of.with_reference(rows, "kept") for of in both]
    columns = [[row.extra["reference"] for row in some] for some in found]
    assert apart(*columns) < 1e-4
