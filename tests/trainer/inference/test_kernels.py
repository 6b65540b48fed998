"""The compiled kernels of the Llama decoder, beside torch's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_models import Asked, as_base, llama, worst_difference
from torch import Tensor

from agentrl_trainer.inference import SampleParams
from agentrl_trainer.inference.cpu import compiled, linear_products
from agentrl_trainer.inference.cpu.kernels import (
    CompiledKernels,
    Heads,
    Places,
    TorchKernels,
)

KINDS = [TorchKernels, CompiledKernels]
SHAPES = [(3, 1, 64), (4, 2, 16), (14, 2, 8), (4, 4, 2), (6, 2, 6), (8, 1, 128), (32, 2, 80)]


def heads(queries: int = 3, keys: int = 1, dim: int = 64) -> Heads:
    return Heads(queries, keys, dim, scale=dim**-0.5, eps=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm_is_rms_norm(kind: type[TorchKernels], scale: float) -> None:
    for rows, size in (5, 576), (1, 7), (700, 40):
        x, weight = torch.randn(rows, size) * scale, torch.randn(size)
        expected = F.rms_norm(x.double(), (size,), None, 1e-6) * weight
        found = kind(heads()).rms_norm(x, weight)
        torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gates_are_silu(kind: type[TorchKernels]) -> None:
    x = torch.cat([torch.randn(50, 2 * 37) * 10, torch.linspace(-300, 300, 148).view(2, -1)])
    gate, up = x.double().chunk(2, -1)
    found = kind(heads()).silu_mul(x)
    torch.testing.assert_close(found, (F.silu(gate) * up).float(), rtol=2e-6, atol=1e-30)


def attention(
    kernels: TorchKernels, spans: list[tuple[int, int]], *, stem: int = 0, norms: bool = False
) -> tuple[Tensor, Tensor]:
    """What kernels compute for rows with (tokens before, new tokens), and what is right."""
    h = kernels.heads
    new = sum(count for _, count in spans)
    x = torch.randn(new, (h.queries + 2 * h.keys), h.dim)
    time = max(map(sum, spans)) + 3
    keys, values = torch.randn(2, len(spans) + 1, h.keys, time, h.dim)
    stems = torch.randn(2, h.keys, stem, h.dim)
    weights = (torch.randn(h.dim), torch.randn(h.dim)) if norms else None
    rows = [row for row, (_, count) in enumerate(spans) for _ in range(count)]
    at = [at for before, count in spans for at in range(before, before + count)]
    angle = torch.rand(new, h.dim // 2).repeat(1, 2) * 6
    sign = torch.cat([-torch.ones(h.dim // 2), torch.ones(h.dim // 2)])
    places = Places(torch.tensor(rows), torch.tensor(at), angle.cos(), angle.sin() * sign)

    q, k, v = x.double().split([h.queries, h.keys, h.keys], 1)
    if weights is not None:
        q, k = (
            F.rms_norm(y, (h.dim,), w.double(), h.eps) for y, w in zip((q, k), weights, strict=True)
        )
    half = h.dim // 2
    cos, sin = angle.cos().double()[:, None], angle.sin().double()[:, None]
    q, k = (y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin for y in (q, k))
    right_keys, right_values = keys.double(), values.double()
    right_keys[rows, :, at], right_values[rows, :, at] = k, v
    expected: list[Tensor] = []
    for token, (row, end) in enumerate(zip(rows, at, strict=True)):
        pair = zip(stems.double(), (right_keys, right_values), strict=True)
        seen = [torch.cat([s, y[row, :, : end + 1]], 1)[None] for s, y in pair]
        query = q[token][None, :, None]
        one = F.scaled_dot_product_attention(query, *seen, scale=h.scale, enable_gqa=True)
        expected.append(one.flatten())
    pair = (stems[0], stems[1]) if stem else None
    found = kernels.attend(x.flatten(1), places, (keys, values), pair, weights)
    torch.testing.assert_close(keys, right_keys.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values, right_values.float())
    return found, torch.stack(expected).float()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_causal_in_each_row(kind: type[TorchKernels], shape) -> None:
    kernels = kind(heads(*shape))
    decoding, prompts = [(40, 1), (0, 1), (31, 1), (32, 1), (95, 1)], [(7, 3), (0, 70), (33, 1)]
    for spans in [(0, 1)], decoding, [(0, 200)], prompts:
        for norms in False, True:
            found, expected = attention(kernels, spans, norms=norms)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_rows_see_the_stem(shape) -> None:
    kernels = CompiledKernels(heads(*shape))
    for spans in [(0, 1)], [(n, 1) for n in range(40)], [(5, 90), (0, 3)]:
        for stem in 1, 32, 100:
            found, expected = attention(kernels, spans, stem=stem)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_is_no_number_shows() -> None:
    kernels = CompiledKernels(heads())
    keys = torch.randn(2, 1, 1, 40, 64)
    keys[0, 0, 0, 3, 5] = float("nan")
    for new in 1, 7:
        angles = torch.ones(new, 64), torch.zeros(new, 64)
        places = Places(torch.zeros(new, dtype=torch.int64), torch.arange(9, 9 + new), *angles)
        found = kernels.attend(torch.randn(new, 5 * 64), places, (keys[0], keys[1]), None, None)
        assert found.isnan().all()
    assert kernels.rms_norm(torch.tensor([[float("nan"), 1.0]]), torch.ones(2)).isnan().all()
    assert kernels.silu_mul(torch.tensor([[float("nan"), 1.0]])).isnan().all()


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "agentrl" / "kernels"
    forget()


def forget() -> None:
    compiled.library.cache_clear()
    linear_products._library.cache_clear()


def test_kernels_are_compiled_once(empty_cache: Path) -> None:
    CompiledKernels(heads())
    (library,) = empty_cache.iterdir()
    made = library.stat().st_mtime_ns
    forget()
    CompiledKernels(heads())
    assert [file.stat().st_mtime_ns for file in empty_cache.iterdir()] == [made]


def test_without_a_compiler_torch_computes(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog, engine_of
) -> None:
    base = as_base(llama())
    monkeypatch.setenv("PATH", str(empty_cache))
    engine = engine_of(base)
    assert engine.strategy == "llama cpu"
    assert "slower without its compiled kernels: there is no C compiler (gcc)" in caplog.text
    answer = Asked(engine, list(range(20)), SampleParams(max_tokens=8)).one()
    assert worst_difference(base.model, list(range(20)), answer) < 1e-5


def test_a_compiler_that_fails_says_why(empty_cache: Path, tmp_path: Path, monkeypatch) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho no such processor >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(OSError, match="no such processor"):
        CompiledKernels(heads())
