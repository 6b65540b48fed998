"""C files of this folder, compiled for this processor at their first use and kept in the cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from torch import Tensor

from agentrl_trainer.names import cache_folder

_FLAGS = [
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno",
    "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math",
]  # fmt: skip
"""Sums in any order, but NaN and infinity as they are."""


@functools.cache
def library(name: str, *definitions: str) -> ctypes.CDLL:
    """Compile ``name.c`` with definitions like ``SIZE=64``.

    Raises:
        OSError: there is no C compiler, or it cannot compile this; its text says why.
        RuntimeError: the user has no home for the cache.
    """
    source = Path(__file__).with_name(f"{name}.c")
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc"))), None)
    if compiler is None:
        raise OSError("there is no C compiler (gcc)")
    openmp = _openmp()
    flags = [*_FLAGS, *(f"-D{definition}" for definition in definitions)]
    # The cache may be shared by machines with other processors.
    target = _run(compiler, "-march=native", "-Q", "--help=target")
    key = "\n".join([source.read_text(), target, openmp, *flags])
    made = cache_folder() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            compiled, linked = f"{folder}/made.o", f"{folder}/made.so"
            _run(compiler, *flags, "-c", str(source), "-o", compiled)
            _run(compiler, "-shared", compiled, openmp, "-o", linked)
            os.replace(linked, made)
    return ctypes.CDLL(str(made))


def address(x: Tensor | None) -> ctypes.c_void_p:
    """Return a tensor's address, NULL for none."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _openmp() -> str:
    """Return the library whose threads torch uses: those of another one would compete with them."""
    maps = Path("/proc/self/maps")  # of Linux
    found = re.findall(r"/.*/libgomp.*", maps.read_text()) if maps.exists() else []
    if not found:
        raise OSError("torch does not use GNU's OpenMP")
    return min(found, key=lambda path: "torch" not in path)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
