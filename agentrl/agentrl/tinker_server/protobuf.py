"""The messages that Tinker's SDK exchanges as protobuf: training data, log-probs and samples.

Knows field numbers, as the SDK 0.38 has them; not what happens with the content. The descriptors
are made here rather than generated, so that neither the SDK nor a compiler is needed; fields that
this server has no use for are left out, and protobuf skips them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from numpy.typing import NDArray

from agentrl_trainer.client import Datum, ForwardBackwardOutput, ModelInput, SampleResponse

PROTOBUF = "application/x-protobuf"
_PACKAGE = "agentrl_tinker"
_FLOAT32 = 1
_KINDS: dict[int, Any] = {1: np.float32, 2: np.int64, 3: np.int32}

# (field, number, type), with "*" for repeated; a type that is no scalar is a message.
_MESSAGES: dict[str, list[tuple[str, int, str]]] = {
    "SparseCsr": [("values", 1, "bytes")],
    "Tensor": [
        ("dense", 1, "bytes"),
        ("sparse_csr", 2, "SparseCsr"),
        ("dtype", 3, "int32"),
        ("shape", 4, "int64*"),
    ],
    "NamedTensor": [("key", 1, "string"), ("value", 2, "Tensor")],
    "EncodedTextChunk": [("tokens", 1, "bytes")],
    "Chunk": [("encoded_text", 1, "EncodedTextChunk")],
    "Datum": [("model_input", 1, "Chunk*"), ("loss_fn_inputs", 2, "NamedTensor*")],
    "Option": [("number", 1, "double"), ("text", 2, "string")],
    "NamedOption": [("key", 1, "string"), ("value", 2, "Option")],
    "ForwardBackwardRequest": [
        ("model_id", 1, "string"),
        ("seq_id", 2, "int32"),
        ("data", 3, "Datum*"),
        ("loss_fn", 4, "string"),
        ("forward_only", 6, "bool"),
        ("loss_fn_config", 7, "NamedOption*"),
    ],
    "BatchedTensor": [("data", 1, "bytes"), ("offsets", 2, "bytes"), ("dtype", 3, "int32")],
    "NamedBatch": [("key", 1, "string"), ("value", 2, "BatchedTensor")],
    "ArrayRecord": [("fields", 2, "NamedBatch*"), ("num_datums", 3, "int64")],
    "Metric": [("key", 1, "string"), ("value", 2, "double")],
    "ForwardBackwardOutput": [
        ("loss_fn_output_type", 1, "string"),
        ("loss_fn_outputs", 2, "ArrayRecord*"),
        ("metrics", 3, "Metric*"),
    ],
    "TopkLogprobs": [
        ("token_ids", 1, "bytes"),
        ("logprobs", 2, "bytes"),
        ("k", 3, "uint32"),
        ("length", 4, "uint32"),
    ],
    "SampledSequence": [
        ("stop_reason", 1, "int32"),
        ("tokens", 2, "bytes"),
        ("logprobs", 3, "bytes"),
        ("topk_sampled_logprobs", 4, "TopkLogprobs"),
    ],
    "SampleResponse": [("sequences", 1, "SampledSequence*"), ("prompt_logprobs", 2, "bytes")],
}
_SCALARS = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="agentrl_tinker.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            plain = kind.removesuffix("*")
            label = 3 if kind.endswith("*") else 1
            made = message.field.add(name=field, number=number, label=label)
            made.type = _SCALARS.get(plain, 11)  # type: ignore[assignment]
            if plain not in _SCALARS:
                made.type_name = f".{_PACKAGE}.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASS = _classes()


class ForwardBackward:
    """A request to train, or to compute log-probs (``forward_only``)."""

    def __init__(self, body: bytes) -> None:
        message = _CLASS["ForwardBackwardRequest"].FromString(body)
        self.model_id: str = message.model_id
        self.seq_id: int = message.seq_id
        self.loss_fn: str = message.loss_fn
        self.forward_only: bool = message.forward_only
        self.config: dict[str, float | str] = {
            option.key: option.value.text or option.value.number
            for option in message.loss_fn_config
        }
        self._data = message.data

    def data(self) -> list[Datum]:
        """Raises ValueError for what is not text, or not one-dimensional."""
        return [
            Datum(
                ModelInput.from_ints(np.concatenate([_tokens(c) for c in datum.model_input])),
                {named.key: _array(named.key, named.value) for named in datum.loss_fn_inputs},
            )
            for datum in self._data
        ]


def _tokens(chunk: Any) -> NDArray[np.int32]:
    if not chunk.HasField("encoded_text"):
        raise ValueError("model_input has a chunk that is no text: only tokens can be trained on")
    return np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32)


def _array(name: str, tensor: Any) -> NDArray[Any]:
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise ValueError(f"{name} must have one dimension: several targets a position are unknown")
    if tensor.dtype not in _KINDS:
        raise ValueError(f"{name} has an unknown data type ({tensor.dtype})")
    return np.frombuffer(tensor.dense, dtype=_KINDS[tensor.dtype])


def forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    message = _CLASS["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    rows = [row["logprobs"].astype(np.float32) for row in output.loss_fn_outputs]
    record = message.loss_fn_outputs.add(num_datums=len(rows))
    batch = record.fields.add(key="logprobs").value
    batch.data = np.concatenate(rows).tobytes() if rows else b""
    ends = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64)
    batch.offsets, batch.dtype = ends.tobytes(), _FLOAT32
    for name, value in output.metrics.items():
        # Their reduction over requests wants to be told how: "what:how".
        message.metrics.add(key=name if ":" in name else f"{name}:mean", value=value)
    return message.SerializeToString()


def sample_response(response: SampleResponse) -> bytes:
    message = _CLASS["SampleResponse"]()
    for sequence in response.sequences:
        made = message.sequences.add(stop_reason=0 if sequence.stop_reason == "stop" else 1)
        made.tokens = sequence.tokens_np.tobytes()
        made.logprobs = sequence.logprobs_np.tobytes()
        if sequence.topk_logprobs:
            _write_topk(made.topk_sampled_logprobs, sequence.topk_logprobs)
    if response.prompt_logprobs is not None:
        values = [np.nan if value is None else value for value in response.prompt_logprobs]
        message.prompt_logprobs = np.asarray(values, dtype=np.float32).tobytes()
    return message.SerializeToString()


def _write_topk(message: Any, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
    pairs = np.asarray(rows, dtype=np.float64)  # [length, k, 2]
    message.length, message.k = pairs.shape[0], pairs.shape[1]
    message.token_ids = pairs[..., 0].astype(np.int32).tobytes()
    message.logprobs = pairs[..., 1].astype(np.float32).tobytes()
