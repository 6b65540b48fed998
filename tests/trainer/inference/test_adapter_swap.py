"""Adapter versions come and go while the engine samples, and leave no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import Asked, as_base, llama, make_adapter, qwen3, settle, worst_difference

from agentrl_trainer.inference import RequestError, SampleParams, llama_cpu
from agentrl_trainer.models.sources import ModelError

CLOSE = 1e-5
PROMPT = [*range(7, 200, 7)]


@pytest.mark.parametrize("merge_below", [10**9, 0], ids=["merged", "unmerged"])
def test_a_version_loaded_after_the_base_was_asked_is_used(
    engine_of, base, tmp_path, merge_below
) -> None:
    plain = copy.deepcopy(base.model)
    engine = engine_of(base, merge_below=merge_below)
    params = SampleParams(max_tokens=8, temperature=0.0)
    for version in (1, 2):
        reference = make_adapter(as_base(plain), tmp_path / f"v{version}", seed=version)
        engine.load_adapter("policy", version, tmp_path / f"v{version}").result(30)
        answer = Asked(engine, PROMPT, params, "policy").one()
        assert answer.versions == {version}
        assert worst_difference(reference, PROMPT, answer) < CLOSE
        assert worst_difference(plain, PROMPT, answer) > 0.01  # it is no small adapter
        assert worst_difference(plain, PROMPT, Asked(engine, PROMPT, params).one()) < CLOSE


@pytest.mark.parametrize("merge_below", [10**9, 0], ids=["merged", "unmerged"])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("decoder", [True, False], ids=["llama_cpu", "modules"])
def test_an_adapter_of_a_tied_head_leaves_the_embeddings_alone(
    engine_of, base, tmp_path, monkeypatch, decoder, merge_below
) -> None:
    plain = copy.deepcopy(base.model)
    assert plain.lm_head.weight is plain.get_input_embeddings().weight
    reference = make_adapter(base, tmp_path / "head", 1, ["lm_head", "q_proj"])
    if not decoder:
        monkeypatch.setattr(llama_cpu, "_PARTS", set())
    engine = engine_of(base, merge_below=merge_below)
    assert (engine.strategy == "llama cpu") == (decoder and merge_below > 0)
    engine.load_adapter("head", 1, tmp_path / "head").result(30)
    for name, model in (("head", reference), (None, plain)):
        answer = Asked(engine, PROMPT, SampleParams(max_tokens=8), name).one()
        assert worst_difference(model, PROMPT, answer) < CLOSE
        with torch.no_grad():
            logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
        [scored] = engine.score([PROMPT], name).result(30)
        assert scored.logprobs[1:] == pytest.approx(expected, abs=CLOSE)


def test_running_sequences_keep_the_version_that_they_started_with(engine, base, tmp_path) -> None:
    versions = (1, 2, 3)
    references = {v: make_adapter(base, tmp_path / f"v{v}", seed=v) for v in versions}
    asked = []
    for version in versions:
        engine.load_adapter("policy", version, tmp_path / f"v{version}").result(30)
        asked.append(Asked(engine, PROMPT, SampleParams(max_tokens=200), "policy"))
        asked[-1].first.wait(30)
    for version, a in zip(versions, asked, strict=True):
        assert a.one().versions == {version}
        assert worst_difference(references[version], PROMPT, a.one()) < CLOSE
    assert engine.stats().reused_tokens == 0
    settle(engine)
    assert engine.adapters == {"policy": 3}
    assert engine.stats().swaps == 3
    assert [lane.version for lane in engine._scheduler.lanes] == [None, 3]


@pytest.mark.parametrize("how", ["swap", "unload"])
def test_a_superseded_version_gives_its_cache_back(engine, base, tmp_path, how: str) -> None:
    for version in (1, 2):
        make_adapter(base, tmp_path / f"v{version}", seed=version)
    engine.load_adapter("policy", 1, tmp_path / "v1").result(30)
    Asked(engine, [*range(90)], SampleParams(max_tokens=20), "policy").wait()
    assert engine.stats().kv_tokens > 90
    if how == "swap":
        engine.load_adapter("policy", 2, tmp_path / "v2").result(30)
    else:
        engine.unload_adapter("policy").result(30)
    assert engine.stats().kv_tokens == 0


def test_an_unloaded_adapter_finishes_what_runs_and_refuses_the_rest(
    engine, base, tmp_path
) -> None:
    make_adapter(base, tmp_path / "a", seed=1)
    engine.load_adapter("policy", 1, tmp_path / "a").result(30)
    running = Asked(engine, PROMPT, SampleParams(max_tokens=100), "policy")
    running.first.wait(30)
    engine.unload_adapter("policy").result(30)
    assert len(running.one().tokens) == 100
    with pytest.raises(RequestError, match="no adapter 'policy'") as caught:
        Asked(engine, PROMPT, SampleParams(max_tokens=1), "policy")
    assert caught.value.code == "unknown_adapter"


def test_a_bad_adapter_folder_raises_for_the_caller(engine, tmp_path) -> None:
    with pytest.raises(ModelError, match="missing"):
        engine.load_adapter("policy", 1, tmp_path)
    make_adapter(as_base(llama()), tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match="another model"):
        engine.load_adapter("policy", 1, tmp_path / "other")
    assert engine.healthy


def test_a_refused_adapter_leaves_no_trace(engine_of, base, tmp_path) -> None:
    """Unmerged, where PEFT has put its layers into the model before it reads weights."""
    references = {None: copy.deepcopy(base.model)}
    references["good"] = make_adapter(base, tmp_path / "good", seed=1)
    models = {"torn": qwen3(), "deep": qwen3(3), "other": llama()}
    said = ("it lacks 14 tensors", "it has unknown 14 tensors", "size mismatch")
    for name, model in models.items():
        make_adapter(as_base(model), tmp_path / name, seed=2)
    file = tmp_path / "torn" / "adapter_model.safetensors"
    kept = {key: tensor for key, tensor in load_file(file).items() if ".layers.0." in key}
    save_file(kept, file, metadata={"format": "pt"})
    engine = engine_of(base, merge_below=0)
    for loaded in (None, "good"):  # refused as the first adapter, and after another one
        if loaded:
            engine.load_adapter(loaded, 1, tmp_path / loaded).result(30)
        for name, why in zip(models, said, strict=True):
            with pytest.raises(ModelError, match=f"(?s)does not fit this model: .*{why}"):
                engine.load_adapter("bad", 1, tmp_path / name).result(30)
            for of in {None, loaded}:
                one = Asked(engine, PROMPT, SampleParams(max_tokens=9, seed=1), of)
                assert worst_difference(references[of], PROMPT, one.one()) < CLOSE
    peft = engine._weights._peft
    assert len(peft.peft_config) == 1
    assert sum(".lora_A." in name for name, _ in peft.named_parameters()) == 14
