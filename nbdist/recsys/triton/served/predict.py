"""A model for Triton's Python backend that runs an ONNX model, for servers without the ONNX Runtime backend.

`nbdist.recsys.triton` writes this file into a model repository, next to ``model.onnx``. It needs NumPy and
onnxruntime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime


class TritonPythonModel:
    """The class that Triton instantiates and calls."""

    def initialize(self, args: dict[str, str]) -> None:
        path = Path(args["model_repository"], args["model_version"], "model.onnx")
        self._session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._inputs = [one.name for one in self._session.get_inputs()]
        self._output = self._session.get_outputs()[0].name

    def execute(self, requests: list[Any]) -> list[Any]:
        """Run the model once for all requests of a batch, and return an answer for each request."""
        import triton_python_backend_utils as backend  # there in the server alone

        columns = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        batch = {name: stack([one[name] for one in columns]) for name in self._inputs}
        answers = self._session.run([self._output], batch)[0]
        ends = np.cumsum([len(one[self._inputs[0]]) for one in columns])[:-1]
        return [backend.InferenceResponse([backend.Tensor(self._output, part)]) for part in np.split(answers, ends)]


def stack(parts: list[Any]) -> Any:
    """Stack arrays of shape (rows, width); narrower ones are padded with -1."""
    width = max(part.shape[1] for part in parts)
    if any(part.shape[1] != width for part in parts):
        parts = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=-1) for part in parts]
    return np.concatenate(parts)
