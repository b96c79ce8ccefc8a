"""The `config.pbtxt` files of a model repository, as Triton's own protocol buffers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class TensorSpec(NamedTuple):
    """An input or output of a model, without the row dimension."""

    name: str
    dtype: Any
    """The NumPy type; object for strings."""
    width: int
    """The shape; -1 for a dimension in which requests may differ."""


class Batching(NamedTuple):
    """Options of batching requests."""

    rows: int
    delay: float
    """The longest delay, in seconds."""


def model_config(
    name: str, backend: str, batching: Batching, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> Any:
    """The configuration of a model that a backend runs."""
    from tritonclient.grpc import model_config_pb2 as pb

    config = _config(name, batching, inputs, outputs)
    config.version_policy.all.SetInParent()  # an ensemble says which it takes
    config.backend = backend
    config.default_model_filename = "model.py" if backend == "python" else "model.onnx"
    config.dynamic_batching.max_queue_delay_microseconds = round(batching.delay * 1e6)
    if backend == "python":
        config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=1)
        # Each request comes by itself there, so that their widths need not be the same.
        for one in config.input:
            one.allow_ragged_batch = -1 in one.dims
    return config


def ensemble_config(
    name: str,
    batching: Batching,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    steps: Sequence[Any],
    version: int,
) -> Any:
    """Return the configuration of an ensemble of consecutive models in some version, given their configurations.

    Tensors between them are named by model and tensor, so that an input and its transformed column may share a name.
    """
    config = _config(name, batching, inputs, outputs)
    config.platform = "ensemble"
    tensors = {tensor.name: tensor.name for tensor in inputs}
    for step in steps:
        last = step is steps[-1]
        one = config.ensemble_scheduling.step.add(model_name=step.name, model_version=version)
        one.input_map.update({tensor.name: tensors[tensor.name] for tensor in step.input})
        tensors = {tensor.name: tensor.name if last else f"{step.name}.{tensor.name}" for tensor in step.output}
        one.output_map.update(tensors)
    return config


def write_config(config: Any, folder: Path) -> None:
    """Write `config.pbtxt` to a model's folder."""
    from google.protobuf import text_format

    (folder / "config.pbtxt").unlink(missing_ok=True)  # it may be another repository's, too
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config), encoding="utf-8")


def read_config(folder: Path) -> Any:
    """Read a file of `write_config`."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as pb

    return text_format.Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), pb.ModelConfig())


def _config(name: str, batching: Batching, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Any:
    from tritonclient.grpc import model_config_pb2 as pb

    config = pb.ModelConfig(name=name, max_batch_size=batching.rows)
    for tensors, field in ((inputs, config.input), (outputs, config.output)):
        for tensor in tensors:
            field.add(name=tensor.name, data_type=_data_type(tensor.dtype), dims=[tensor.width])
    return config


def _data_type(dtype: Any) -> Any:
    from tritonclient.grpc import model_config_pb2 as pb
    from tritonclient.utils import np_to_triton_dtype

    name = np_to_triton_dtype(np.dtype(dtype))
    return pb.DataType.Value("TYPE_STRING" if name == "BYTES" else f"TYPE_{name}")
