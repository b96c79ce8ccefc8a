"""The modes of torch in a process: read in the notebook, set in its ranks."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .big_data import own_device

#: Where `fp32_precision` is an attribute in torch 2.9 and newer, the most general first.
_FP32 = ("", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
_SDP = ("flash", "mem_efficient", "math", "cudnn")


class _Mode(NamedTuple):
    read: Callable[[Any], Any]
    """A function of torch that reads the mode."""
    write: Callable[[Any, Any], Any]
    """A function of torch and the value that sets the mode."""


def read(torch: Any) -> dict[str, Any]:
    """Return the current modes of torch, by name."""
    return {name: mode.read(torch) for name, mode in _MODES.items()}


def write(torch: Any, value: Mapping[str, Any], last: Mapping[str, Any]) -> None:
    """Set the modes in `value` that differ from the `last` ones.

    Unchanged modes are not set: `use_deterministic_algorithms(False)` would import modules for a second.
    """
    for name, new in value.items():
        if last[name] != new:
            _MODES[name].write(torch, new)


def _read_fp32(torch: Any) -> Any:
    try:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # torch refuses this once `fp32_precision` was set
        return {name: _fp32_of(torch, name).fp32_precision for name in _FP32}


def _write_fp32(torch: Any, value: Any) -> None:
    if isinstance(value, tuple):
        if getattr(torch.backends, "fp32_precision", "none") != "none":
            torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision(value[0])
        if _read_fp32(torch) != value:
            torch.backends.cudnn.allow_tf32 = value[1]
        return
    for name, precision in value.items():
        if _fp32_of(torch, name).fp32_precision != precision:
            _fp32_of(torch, name).fp32_precision = precision


def _fp32_of(torch: Any, name: str) -> Any:
    return operator.attrgetter(name)(torch.backends) if name else torch.backends


def _write_cudnn(torch: Any, value: tuple[bool, bool]) -> None:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = value


def _write_sdp(torch: Any, value: tuple[bool, ...]) -> None:
    for name, on in zip(_SDP, value, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


def _read_autocast(torch: Any) -> Any:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _write_autocast(torch: Any, value: Any) -> None:
    for kind, on, dtype in value:
        torch.set_autocast_enabled(kind, on)
        torch.set_autocast_dtype(kind, dtype)
    # torch empties the cache of converted weights at the end of a `with` block, which a rank never leaves.
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(not any(on for _, on, _ in value))


def _read_device(torch: Any) -> str | None:
    # Not `torch.get_default_device()`, which creates a tensor on a GPU to find its number.
    device = getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)
    return None if device is None else str(device.type)


def _write_device(torch: Any, kind: str | None) -> None:
    device = own_device().type if kind == "cuda" else kind
    torch.set_default_device(device if device in ("cuda", "meta") else None)


_MODES = {
    "dtype": _Mode(lambda torch: torch.get_default_dtype(), lambda torch, dtype: torch.set_default_dtype(dtype)),
    "device": _Mode(_read_device, _write_device),
    "fp32": _Mode(_read_fp32, _write_fp32),
    "deterministic": _Mode(
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, on: torch.use_deterministic_algorithms(on[0], warn_only=on[1]),
    ),
    "fill memory": _Mode(
        lambda torch: torch.utils.deterministic.fill_uninitialized_memory,
        lambda torch, on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", on),
    ),
    "backward in threads": _Mode(
        lambda torch: torch._C._is_multithreading_enabled(),
        lambda torch, on: torch._C._set_multithreading_enabled(on),
    ),
    "sharing": _Mode(
        lambda torch: torch.multiprocessing.get_sharing_strategy(),
        lambda torch, name: torch.multiprocessing.set_sharing_strategy(name),
    ),
    "grad": _Mode(lambda torch: torch.is_grad_enabled(), lambda torch, on: torch.set_grad_enabled(on)),
    "anomaly": _Mode(
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, value: torch.autograd.set_detect_anomaly(*value),
    ),
    "warn always": _Mode(lambda torch: torch.is_warn_always_enabled(), lambda torch, on: torch.set_warn_always(on)),
    "print options": _Mode(
        lambda torch: dict(vars(torch._tensor_str.PRINT_OPTS)),
        lambda torch, value: vars(torch._tensor_str.PRINT_OPTS).update(value),
    ),
    "mkldnn": _Mode(lambda torch: torch._C._get_mkldnn_enabled(), lambda torch, on: torch._C._set_mkldnn_enabled(on)),
    "autocast": _Mode(_read_autocast, _write_autocast),
    "cudnn": _Mode(lambda torch: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic), _write_cudnn),
    "sdp": _Mode(
        lambda torch: tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _SDP), _write_sdp
    ),
}
