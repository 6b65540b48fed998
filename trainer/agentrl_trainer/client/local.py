"""The local backend: the learner and the embedded sampler of this process.

Knows the learner, the sampler's engine, checkpoints and PEFT folders. Every base model has one
thread, on which everything happens that touches its learner, in order; sampling has the engine's
thread and a copy of the base of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from agentrl_trainer import learner as engine
from agentrl_trainer.batches import Datum as Row
from agentrl_trainer.checkpoint import (
    Checkpoint,
    Restored,
    latest_checkpoint,
    load_checkpoint,
    restore_rng,
    save_checkpoint,
)
from agentrl_trainer.client.backend import CustomLoss, Data
from agentrl_trainer.client.futures import Worker, follows, map_future, wait
from agentrl_trainer.client.rows import check_loss, outputs, to_rows
from agentrl_trainer.client.types import (
    AdamParams,
    Folder,
    ForwardBackwardOutput,
    LoraOptions,
    ModelData,
    ModelInfo,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SavedPath,
)
from agentrl_trainer.experts import adaptable
from agentrl_trainer.learner import Learner, StepStats
from agentrl_trainer.losses import LossConfig
from agentrl_trainer.model import CONFIG_FILE, TINY_MODEL, BaseModel, load_base, save_adapter
from agentrl_trainer.sampler import (
    Event,
    Finished,
    RequestError,
    SampleParams,
    SamplerEngine,
    SampleRequest,
    Token,
    check_params,
)

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
STATES, SAMPLERS = "weights", "sampler_weights"


class LocalBase:
    """One base model: the adapters that train over it, and the sampler that serves them.

    ``learner_options`` go to ``Learner``. The weights are loaded once for training and once for
    sampling, each when it is first asked for.
    """

    def __init__(
        self,
        name: str,
        device: str,
        dtype: str,
        load_in_4bit: bool,
        learner_options: Mapping[str, Any],
    ) -> None:
        self.name = name
        self._load = partial(load_base, name, device=device, dtype=dtype, load_in_4bit=load_in_4bit)
        self._learner_options = learner_options
        self._worker = Worker(f"agentrl-train-{name}")
        self._lock = threading.Lock()
        self._training: BaseModel | None = None
        self._engine: SamplerEngine | None = None
        self._served = 0
        self.learner: Learner | None = None
        self.adaptable: list[str] = []
        """The base's linear layers and experts, by path; known once it is loaded for training."""

    def run(self, work: Callable[[], T]) -> Future[T]:
        """In its turn, on the base's thread."""
        return self._worker.submit(work)

    @property
    def training(self) -> BaseModel:
        with self._lock:
            if self._training is None:
                self._training = self._load()
                self.adaptable = adaptable(self._training.model)
            return self._training

    @property
    def sampler(self) -> SamplerEngine:
        with self._lock:
            if self._engine is None:
                self._engine = SamplerEngine(self._load())
                self._engine.start()
            return self._engine

    def add_adapter(
        self, name: str, rank: int, alpha: float, targets: str | list[str], seed: int
    ) -> None:
        """On the base's thread."""
        if self.learner is None:
            self.learner = Learner(
                self.training,
                adapters=(name,),
                rank=rank,
                alpha=alpha,
                targets=targets,
                seed=seed,
                **self._learner_options,
            )
        else:
            self.learner.add_adapter(name, rank=rank, alpha=alpha, targets=targets, seed=seed)

    def trained(self) -> Learner:
        """On the base's thread."""
        if self.learner is None:
            raise ValueError("nothing trains over this model: create a training client first")
        return self.learner

    def serve(self, folder: Folder) -> str:
        """Load a PEFT folder into the sampler, under a name of its own."""
        sampler = self.sampler
        with self._lock:
            self._served += 1
            name = f"weights-{self._served}"
        sampler.load_adapter(name, 1, folder).result()
        return name

    def unload(self, name: str) -> None:
        """Forget served weights. Takes no lock: finalizers call it, whatever their thread holds."""
        if self._engine is not None:
            with contextlib.suppress(RequestError):  # the sampler has ended
                self._engine.unload_adapter(name)

    def close(self) -> None:
        self._worker.shutdown()
        if self._engine is not None:
            self._engine.stop()


class LocalService:
    def __init__(
        self,
        folder: Folder | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        load_in_4bit: bool = False,
        **learner_options: Any,
    ) -> None:
        self.folder = Path(folder) if folder is not None else _new_folder()
        self._where = (device, dtype, load_in_4bit, learner_options)
        self._bases: dict[str, LocalBase] = {}
        self._names: set[str] = set()
        self._made = 0
        self._lock = threading.Lock()

    def base(self, name: str) -> LocalBase:
        with self._lock:
            if name not in self._bases:
                self._bases[name] = LocalBase(name, *self._where)
            return self._bases[name]

    def train(self, base_model: str, options: LoraOptions, name: str | None) -> LocalTraining:
        base = self.base(base_model)
        base.training  # noqa: B018 - a name that is no model's fails here, not in a future
        with self._lock:
            self._made += 1
            name = name or f"model-{self._made}"
            _check_name(name)
            if "." in name:
                raise ValueError(f"name: {name!r} may not have dots")
            if name in self._names:
                raise ValueError(f"name: {name!r} is taken by another client of this service")
            self._names.add(name)
        try:
            return LocalTraining(base, name, self.folder / name, options)
        except BaseException:
            with self._lock:
                self._names.discard(name)
            raise

    def train_from(self, path: str, *, optimizer: bool, name: str | None) -> LocalTraining:
        meta = _state(path).meta
        saved = {**meta["lora"], "user_metadata": None}
        client = self.train(meta["base_model"], LoraOptions(**saved), name)
        wait(client.load_state(path, optimizer))
        return client

    def sampler(self, model_path: str | None, base_model: str | None) -> LocalSampling:
        if model_path is None:
            assert base_model is not None
            base = self.base(base_model)
            base.sampler  # noqa: B018 - as above
            return LocalSampling(base, _done(None))
        config = Path(model_path) / CONFIG_FILE
        if not config.is_file():
            raise ValueError(
                f"model_path: {config} does not exist; give what save_weights_for_sampler returned"
            )
        base = self.base(json.loads(config.read_text())["base_model_name_or_path"])
        return LocalSampling(base, _done(base.serve(model_path)))

    def models(self) -> list[str]:
        return sorted({TINY_MODEL, *self._bases})

    def save_checkpoint(
        self, root: Path, step: int, meta: Mapping[str, Any], keep: int
    ) -> Future[SavedPath]:
        base = self._only_base()

        def work() -> SavedPath:
            state = base.trained().state_dict()
            return SavedPath(str(save_checkpoint(root, step, tensors=state, meta=meta, keep=keep)))

        return base.run(work)

    def restore_checkpoint(self, root: Path) -> Future[Restored]:
        base = self._only_base()

        def work() -> Restored:
            found = latest_checkpoint(root)
            if found.folder is None:
                return Restored(None, {}, found.torn)
            checkpoint = load_checkpoint(found.folder)
            base.trained().load_state_dict(checkpoint.tensors)
            restore_rng(checkpoint.rng)
            return Restored(checkpoint.step, checkpoint.meta, found.torn)

        return base.run(work)

    def _only_base(self) -> LocalBase:
        if len(self._bases) != 1:
            raise ValueError(f"a checkpoint is of one base model; this has {[*self._bases]}")
        return next(iter(self._bases.values()))

    def close(self, error: BaseException | None) -> None:
        for base in self._bases.values():
            base.close()


class LocalTraining:
    def __init__(self, base: LocalBase, name: str, folder: Path, options: LoraOptions) -> None:
        if options.train_unembed:
            raise ValueError(
                "train_unembed: the output embedding cannot be trained locally; leave it False"
            )
        self.base = base
        self.name = name
        self.folder = folder
        self._options = options
        self._updates = 0
        self._failed: BaseException | None = None  # what left this step's gradients incomplete
        model = base.training
        config = model.model.config
        self._vocabulary = int(model.model.get_input_embeddings().weight.shape[0])  # type: ignore
        self._context = model.context_length
        self.info = ModelInfo(
            model_id=name,
            model_data=ModelData(str(config.model_type), base.name, base.name),
            model_name=base.name,
            lora_rank=options.rank,
        )
        targets = _targets(base.adaptable, options)
        seed = secrets.randbelow(2**31) if options.seed is None else options.seed
        added = base.run(lambda: base.add_adapter(name, options.rank, options.alpha, targets, seed))
        try:
            wait(added)
        except BaseException:
            added.cancel()  # where nobody waits, nobody wants it
            raise

    @property
    def learner(self) -> Learner:
        return self.base.trained()

    # ---- learning

    def forward(
        self, data: Data, loss_fn: str, config: LossConfig | None
    ) -> Future[ForwardBackwardOutput]:
        check_loss(loss_fn, config)
        rows = self._rows(data, None)

        def work() -> ForwardBackwardOutput:
            found = self.learner.forward(rows)
            weights = [row.advantages for row in rows]
            loss = -sum(
                w * lp
                for ws, lps in zip(weights, found, strict=True)
                for w, lp in zip(ws, lps, strict=True)
            )
            metrics = {"loss:sum": loss} if loss_fn == "cross_entropy" else {}
            return ForwardBackwardOutput(outputs(found), metrics)

        return self.base.run(work)

    def forward_backward(
        self,
        data: Data,
        loss_fn: str,
        config: LossConfig | None,
        normalize_by: float | None,
        logprobs: bool,
    ) -> Future[ForwardBackwardOutput]:
        check_loss(loss_fn, config)
        if normalize_by is not None and not normalize_by > 0:
            raise ValueError(f"normalize_by must be above 0, or None; not {normalize_by}")
        rows = self._rows(data, loss_fn)

        def work() -> ForwardBackwardOutput:
            found = [[0.0] * len(row.tokens) for row in rows] if logprobs else None
            stats = self.learner.forward_backward(rows, loss_fn, config, normalize_by, found)
            return ForwardBackwardOutput(outputs(found or []), _metrics(stats, loss_fn), stats)

        return self.base.run(self._accumulates(work))

    def forward_backward_custom(
        self, data: Data, function: CustomLoss
    ) -> Future[ForwardBackwardOutput]:
        ours: Any = data
        rows = self._rows(data, None)
        found: list[list[float]] = []

        def of_targets(_: Any, logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, float]]:
            found.extend(row.tolist() for row in logprobs)
            return function(ours, [row[1:] for row in logprobs])

        def work() -> ForwardBackwardOutput:
            stats, metrics = self.learner.forward_backward_custom(rows, of_targets)
            known = _metrics(stats, "cross_entropy")
            return ForwardBackwardOutput(outputs(found), {**known, **metrics}, stats)

        return self.base.run(self._accumulates(work))

    def optim_step(self, adam: AdamParams) -> Future[OptimStepResponse]:
        ours = adam_of(adam)

        def work() -> OptimStepResponse:
            failed, self._failed = self._failed, None
            if failed is not None:
                self.learner.discard_gradients([self.name])
                raise RuntimeError(
                    "nothing was updated: a forward_backward before this step failed, so its "
                    f"gradients are incomplete ({failed})"
                ) from failed
            stats = self.learner.optim_step(ours, [self.name])
            self._updates += not stats.skipped_non_finite
            refused = float(stats.skipped_non_finite)
            return OptimStepResponse({"grad_norm": stats.grad_norm, "skipped_non_finite": refused})

        return self.base.run(work)

    def _accumulates(self, work: Callable[[], T]) -> Callable[[], T]:
        def guarded() -> T:
            try:
                return work()
            except BaseException as error:
                self._failed = error
                raise

        return guarded

    def local(self, work: Callable[[Learner], T]) -> Future[T]:
        return self.base.run(lambda: work(self.learner))

    def _rows(self, data: Data, loss_fn: str | None) -> list[Row]:
        return to_rows(data, self.name, loss_fn, self._vocabulary, self._context)

    # ---- weights

    def save_state(self, name: str, overwrite: bool) -> Future[SavedPath]:
        target = self._target(STATES, name, overwrite)

        def work() -> SavedPath:
            meta = {
                "base_model": self.base.name,
                "adapter": self.name,
                "lora": {**asdict(self._options), "user_metadata": None},
            }
            state = self.learner.state_dict([self.name])
            save_checkpoint(target, self._updates, tensors=state, meta=meta, keep=1)
            return SavedPath(str(target))

        return self.base.run(work)

    def load_state(self, path: str, optimizer: bool) -> Future[None]:
        def work() -> None:
            found = _state(path)
            ours = _renamed(found.tensors, found.meta["adapter"], self.name)
            if not optimizer:
                ours = {key: value for key, value in ours.items() if key.startswith("weights/")}
            self.learner.load_state_dict(ours, [self.name])
            self._updates = found.step if optimizer else 0
            self._failed = None

        return self.base.run(work)

    def save_weights_for_sampler(self, name: str | Path) -> Future[SavedPath]:
        target = name if isinstance(name, Path) else self._target(SAMPLERS, name, overwrite=True)

        def work() -> SavedPath:
            save_adapter(self.learner.model, self.name, target)
            return SavedPath(str(target))

        return self.base.run(work)

    def sampler(self) -> LocalSampling:
        def work() -> str:
            with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
                save_adapter(self.learner.model, self.name, Path(folder) / "adapter")
                return self.base.serve(Path(folder) / "adapter")

        return LocalSampling(self.base, self.base.run(work))

    def tokenizer(self) -> Any:
        return self.base.training.tokenizer

    def _target(self, kind: str, name: str, overwrite: bool) -> Path:
        _check_name(name)
        target = self.folder / kind / name
        if target.exists() and not overwrite:
            raise FileExistsError(f"{target} exists: take another name, or overwrite=True")
        return target


class LocalSampling:
    """``name``: what the sampler knows the weights by, once they are loaded; None is the base."""

    def __init__(self, base: LocalBase, name: Future[Any]) -> None:
        self.base = base
        self.base_model = base.name
        self._name: Future[str | None] = name
        weakref.finalize(self, _unload, base, name)

    @property
    def ready(self) -> Future[None]:
        return map_future(self._name, lambda _: None)

    def sample(
        self,
        prompt: list[int],
        num_samples: int,
        params: SamplingParams,
        prompt_logprobs: bool,
        topk: int,
    ) -> Future[SampleResponse]:
        sampler = self.base.sampler
        ours = _sample_params(sampler.base, params, len(prompt), num_samples, topk)
        check_params(ours)
        if not prompt_logprobs:
            return self._submitted(sampler, prompt, ours)
        whole: Future[SampleResponse] = self._future()
        scored = self.logprobs([prompt])

        def with_scores(done: Future[SampleResponse]) -> None:
            try:
                whole.set_result(SampleResponse(done.result().sequences, scored.result()[0]))
            except BaseException as error:
                whole.set_exception(error)

        # First in is first done: the scores are there when the samples are.
        scored.add_done_callback(
            lambda _: self._submitted(sampler, prompt, ours).add_done_callback(with_scores)
        )
        return whole

    def _submitted(
        self, sampler: SamplerEngine, prompt: list[int], params: SampleParams
    ) -> Future[SampleResponse]:
        gathering = _Gathering(params, self, self._future())

        def submit(name: Future[str | None]) -> None:
            try:
                sampler.submit(SampleRequest(prompt, params, name.result(), gathering.on_event))
            except BaseException as error:
                gathering.future.set_exception(error)

        self._name.add_done_callback(submit)
        return gathering.future

    def logprobs(self, rows: Sequence[list[int]]) -> Future[list[list[float | None]]]:
        sampler = self.base.sampler
        whole: Future[list[list[float | None]]] = self._future()

        def score(name: Future[str | None]) -> None:
            try:
                found = sampler.logprobs(rows, name.result())
            except BaseException as error:
                whole.set_exception(error)
            else:
                found.add_done_callback(hand_over)

        def hand_over(found: Future[list[list[float]]], keep: LocalSampling = self) -> None:
            try:
                whole.set_result([[None, *row[1:]] for row in found.result()])
            except BaseException as error:
                whole.set_exception(error)

        self._name.add_done_callback(score)
        return whole

    def _future(self) -> Future[Any]:
        """Of something that needs the weights; it cannot be cancelled."""
        future = follows(Future[Any](), self._name)
        future.set_running_or_notify_cancel()
        return future

    def tokenizer(self) -> Any:
        return self.base.sampler.base.tokenizer


class _Gathering:
    """One request's events, until all its sequences have ended."""

    def __init__(
        self, params: SampleParams, client: LocalSampling, future: Future[SampleResponse]
    ) -> None:
        self.future = future
        # Kept until the samples are there: when it goes its weights are unloaded.
        self._client: LocalSampling | None = client
        self._tokens: list[list[Token]] = [[] for _ in range(params.n)]
        self._ends: dict[int, Finished] = {}
        self._topk = params.top_logprobs

    def on_event(self, event: Event) -> None:
        """On the engine's thread."""
        if isinstance(event, Token):
            self._tokens[event.index].append(event)
            return
        self._ends[event.index] = event
        if len(self._ends) < len(self._tokens):
            return
        self._client = None
        bad = [end for end in self._ends.values() if end.reason not in ("stop", "length")]
        if bad:
            why = bad[0].error or bad[0].reason
            self.future.set_exception(RuntimeError(f"sampling ended early: {why}"))
            return
        self.future.set_result(
            SampleResponse([self._sequence(index) for index in range(len(self._tokens))])
        )

    def _sequence(self, index: int) -> SampledSequence:
        tokens = self._tokens[index]
        reason = self._ends[index].reason
        return SampledSequence(
            tokens=[token.token_id for token in tokens],
            logprobs=[token.logprob for token in tokens],
            stop_reason="stop" if reason == "stop" else "length",
            topk_logprobs=[token.top for token in tokens] if self._topk else None,
        )


def adam_of(adam: AdamParams) -> engine.AdamParams:
    """The learner's; ValueError for what AdamW cannot take."""
    for name, value in asdict(adam).items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"adam_params: {name} must be finite and not negative, not {value}")
    if adam.beta1 >= 1 or adam.beta2 >= 1:
        raise ValueError(f"adam_params: betas must be below 1, not {adam.beta1}, {adam.beta2}")
    return engine.AdamParams(
        lr=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip_norm=adam.grad_clip_norm,
    )


def _metrics(stats: StepStats, loss_fn: str) -> dict[str, float]:
    found = {"loss:sum": stats.loss, "tokens:sum": float(stats.tokens)}
    if loss_fn == "cross_entropy":  # it compares with no sampler
        return found
    found |= {
        "entropy:mean": stats.entropy,
        "ratio:mean": stats.ratio_mean,
        "ratio:max": stats.ratio_max,
        "clip_fraction:mean": stats.clip_fraction,
        "sampler_trainer_kl:mean": stats.sampler_trainer_kl,
        "logprob_difference:max": stats.max_logprob_difference,
    }
    return found | {f"{name}:mean": value for name, value in stats.metrics.items()}


def _sample_params(
    base: BaseModel, params: SamplingParams, prompt: int, num_samples: int, topk: int
) -> SampleParams:
    stop = params.stop
    words = [stop] if isinstance(stop, str) else list(stop or [])
    strings = tuple(word for word in words if isinstance(word, str))
    ids = frozenset(int(word) for word in words if not isinstance(word, str))
    if strings and ids:
        raise ValueError("stop: give strings or token ids, not both")
    own_ends = stop is None or bool(strings)
    room = base.context_length - prompt
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt} tokens and the model's context is {base.context_length}, "
            "answer included: cut it"
        )
    return SampleParams(
        max_tokens=room if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop_ids=base.eos_ids if own_ends else ids,
        stop=strings,
        seed=params.seed,
        n=num_samples,
        top_logprobs=topk,
    )


def _targets(paths: Sequence[str], options: LoraOptions) -> str | list[str]:
    """PEFT's target_modules."""
    if options.targets is not None:
        return options.targets
    if options.train_mlp and options.train_attn:
        return "all-linear"
    if not (options.train_mlp or options.train_attn):
        raise ValueError("train_mlp and train_attn are both False: nothing would be trained")
    wanted = "mlp" if options.train_mlp else "attn"
    split = [path.rpartition(".") for path in paths]
    found = sorted({leaf for owner, _, leaf in split if wanted in owner})
    if not found:
        raise ValueError(
            f"the model has no linear layers under a name with {wanted!r}: set targets"
        )
    return found


def _state(path: str) -> Checkpoint:
    latest = latest_checkpoint(path)
    if latest.folder is None:
        why = "; ".join(f"{folder.name}: {fault}" for folder, fault in latest.torn.items())
        raise ValueError(
            f"path: {path} holds no whole state{f' ({why})' if why else ''}; give what save_state "
            "returned"
        )
    return load_checkpoint(latest.folder)


def _renamed(state: Mapping[str, Tensor], before: str, after: str) -> dict[str, Tensor]:
    """``kind/owner/key`` of another adapter and its value function (``value.<adapter>``)."""
    found: dict[str, Tensor] = {}
    for whole, tensor in state.items():
        kind, owner, key = whole.split("/", 2)
        part, dot, adapter = owner.rpartition(".")  # no adapter's name has a dot
        if adapter == before:
            found[f"{kind}/{part}{dot}{after}/{key}"] = tensor
    return found


def _unload(base: LocalBase, name: Future[str | None]) -> None:
    """Also of a client that is gone before its weights were loaded."""

    def unload(done: Future[str | None]) -> None:
        loaded = None if done.exception() is not None else done.result()
        if loaded is not None:
            base.unload(loaded)

    name.add_done_callback(unload)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"name: {name!r} must be letters, digits, '-', '_' and '.'")


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _new_folder() -> Path:
    return Path("runs") / f"client-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
