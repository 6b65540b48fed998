"""Convert Tinker's protobuf messages (``tinker.proto`` of the official SDK) to the client's values
and back: training data, log-probs and samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as proto

from agentrl_trainer.client import Datum, ForwardBackwardOutput, ModelInput, SampleResponse

PROTOBUF = "application/x-protobuf"
_KINDS: dict[int, Any] = {
    proto.DTYPE_FLOAT32: np.float32,
    proto.DTYPE_INT64: np.int64,
    proto.DTYPE_INT32: np.int32,
}


def datums(request: proto.ForwardBackwardRequest) -> list[Datum]:
    """Return the request's data; ValueError for input that is no text or not one-dimensional."""
    return [
        Datum(
            ModelInput.from_ints(np.concatenate([_tokens(c) for c in datum.model_input])),
            {name: _array(name, tensor) for name, tensor in datum.loss_fn_inputs.items()},
        )
        for datum in request.data
    ]


def _tokens(chunk: proto.Chunk) -> NDArray[np.int32]:
    if not chunk.HasField("encoded_text"):
        raise ValueError("model_input has a chunk that is no text: only tokens can be trained on")
    return np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32)


def _array(name: str, tensor: proto.Tensor) -> NDArray[Any]:
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise ValueError(f"{name} must have one dimension: one target a position")
    if tensor.dtype not in _KINDS:
        raise ValueError(f"{name} has an unknown data type ({tensor.dtype})")
    return np.frombuffer(tensor.dense, dtype=_KINDS[tensor.dtype])


def forward_backward_output(output: ForwardBackwardOutput) -> bytes:
    """Serialize the log-probs and metrics of a step."""
    rows = [row["logprobs"].astype(np.float32) for row in output.loss_fn_outputs]
    batch = proto.BatchedTensor(
        data=np.concatenate(rows).tobytes() if rows else b"",
        offsets=np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64).tobytes(),
        dtype=proto.DTYPE_FLOAT32,
    )
    return proto.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[proto.ArrayRecord(num_datums=len(rows), fields={"logprobs": batch})],
        # The SDK combines metrics of several requests by the reduction in their names.
        metrics={k if ":" in k else f"{k}:mean": value for k, value in output.metrics.items()},
    ).SerializeToString()


def sample_response(response: SampleResponse) -> bytes:
    """Serialize sampled sequences and the prompt's log-probs."""
    message = proto.SampleResponse()
    for sequence in response.sequences:
        stopped = sequence.stop_reason == "stop"
        made = message.sequences.add(
            stop_reason=proto.STOP_REASON_STOP if stopped else proto.STOP_REASON_LENGTH,
            tokens=sequence.tokens_np.tobytes(),
            logprobs=sequence.logprobs_np.tobytes(),
        )
        if sequence.topk_logprobs:
            pairs = np.asarray(sequence.topk_logprobs, dtype=np.float64)  # [length, k, 2]
            top = made.topk_sampled_logprobs
            top.length, top.k, _ = pairs.shape
            top.token_ids = pairs[..., 0].astype(np.int32).tobytes()
            top.logprobs = pairs[..., 1].astype(np.float32).tobytes()
    if response.prompt_logprobs is not None:
        values = [np.nan if value is None else value for value in response.prompt_logprobs]
        message.prompt_logprobs = np.asarray(values, dtype=np.float32).tobytes()
    return message.SerializeToString()
