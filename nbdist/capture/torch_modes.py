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
#: Flags that `torch._C._get_NAME` reads and `torch._C._set_NAME` sets.
_FLAGS = (
    *("cudnn_enabled", "nnpack_enabled", "mkldnn_enabled", "mkldnn_deterministic", "qengine", "sdp_priority_order"),
    *("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction"),
    *("cublas_allow_fp16_accumulation", "cpu_allow_fp16_reduced_precision_reduction"),
    *("math_sdp_allow_fp16_bf16_reduction", "linalg_preferred_backend", "blas_preferred_backend"),
    *("sm_carveout_experimental", "autograd_fallback_mode"),
)
#: To find the preferred library, torch for AMD's GPUs asks the driver, which may not be used before a fork.
_NOT_ON_HIP = ("blas_preferred_backend",)


class _Mode(NamedTuple):
    read: Callable[[Any], Any]
    """A function of torch that reads the mode."""
    write: Callable[[Any, Any], Any]
    """A function of torch and the value that sets the mode."""


def read(torch: Any) -> dict[str, Any]:
    """Return the current modes of torch, by name."""
    found = {name: mode.read(torch) for name, mode in _MODES.items()}
    for name in _FLAGS:  # an older torch lacks some
        getter = getattr(torch._C, f"_get_{name}", None)
        if getter is not None and not (torch.version.hip and name in _NOT_ON_HIP):
            found[name] = getter()
    return found


def write(torch: Any, value: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Exception]:
    """Set the modes in `value` that differ from the `last` ones. Return the exceptions of those that cannot be set, by
    name.

    Unchanged modes are not set: `use_deterministic_algorithms(False)` would import modules for a second.
    """
    failed = {}
    for name in [name for name, new in value.items() if last[name] != new]:
        try:
            _write(torch, name, value[name])
        except Exception as exc:
            failed[name] = exc
    return failed


def _write(torch: Any, name: str, new: Any) -> None:
    if name in _MODES:
        _MODES[name].write(torch, new)
    else:  # cuBLAS' reductions are two flags each
        getattr(torch._C, f"_set_{name}")(*(new if isinstance(new, tuple) else (new,)))


def _read_fp32(torch: Any) -> Any:
    newer = {name: _fp32_of(torch, name).fp32_precision for name in _FP32 if hasattr(torch.backends, "fp32_precision")}
    try:
        return (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32), newer
    except RuntimeError:  # torch refuses this where `fp32_precision` was set to what the older names cannot say
        return None, newer


def _write_fp32(torch: Any, value: Any) -> None:
    older, newer = value
    if older is not None:
        if getattr(torch.backends, "fp32_precision", "none") != "none":
            torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision(older[0])
        if _read_fp32(torch)[0] != older:
            torch.backends.cudnn.allow_tf32 = older[1]
    for name, precision in newer.items():
        if _fp32_of(torch, name).fp32_precision != precision:
            _fp32_of(torch, name).fp32_precision = precision


def _fp32_of(torch: Any, name: str) -> Any:
    return operator.attrgetter(name)(torch.backends) if name else torch.backends


def _read_cudnn(torch: Any) -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit


def _write_cudnn(torch: Any, value: tuple[Any, ...]) -> None:
    cudnn = torch.backends.cudnn
    cudnn.benchmark, cudnn.deterministic, cudnn.benchmark_limit = value


def _write_sdp(torch: Any, value: tuple[bool, ...]) -> None:
    for name, on in zip(_SDP, value, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


def _read_autocast(torch: Any) -> Any:
    kinds = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return kinds, torch.is_autocast_cache_enabled()


def _write_autocast(torch: Any, value: Any) -> None:
    kinds, cache = value
    for kind, on, dtype in kinds:
        torch.set_autocast_enabled(kind, on)
        torch.set_autocast_dtype(kind, dtype)
    # torch empties the cache of converted weights at the end of a `with` block, which a rank never leaves.
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(cache and not any(on for _, on, _ in kinds))


def _read_device(torch: Any) -> str | None:
    # Not `torch.get_default_device()`, which creates a tensor on a GPU to find its number.
    device = getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)
    return None if device is None else str(device.type)


def _write_device(torch: Any, kind: str | None) -> None:
    device = own_device().type if kind == "cuda" else kind
    torch.set_default_device(device if device in ("cuda", "meta") else None)


def _flushes_denormal(torch: Any) -> bool:
    """Return whether this thread takes the smallest numbers for 0. torch cannot be asked, but arithmetic can."""
    smallest = float.fromhex("0x1p-1074")
    return smallest * 1.0 == 0.0


#: The inference mode that ranks are in, until they leave it.
_inference: list[Any] = []


def _write_inference(torch: Any, on: bool) -> None:
    if on:
        _inference.append(torch.inference_mode())
        _inference[-1].__enter__()
    while _inference and not on:
        _inference.pop().__exit__(None, None, None)


def _write_invariants(torch: Any, on: bool) -> None:
    check = torch.sparse.check_sparse_tensor_invariants
    check.enable() if on else check.disable()


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
    # Before the mode of gradients, which it switches off.
    "inference": _Mode(lambda torch: torch.is_inference_mode_enabled(), _write_inference),
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
    "denormal": _Mode(_flushes_denormal, lambda torch, on: torch.set_flush_denormal(on)),
    "sparse invariants": _Mode(
        lambda torch: torch.sparse.check_sparse_tensor_invariants.is_enabled(), _write_invariants
    ),
    "attention in one kernel": _Mode(
        lambda torch: torch.backends.mha.get_fastpath_enabled(),
        lambda torch, on: torch.backends.mha.set_fastpath_enabled(on),
    ),
    "parameters that are swapped": _Mode(
        lambda torch: torch.__future__.get_swap_module_params_on_conversion(),
        lambda torch, on: torch.__future__.set_swap_module_params_on_conversion(on),
    ),
    "checks of distributions": _Mode(
        lambda torch: torch.distributions.Distribution._validate_args,
        lambda torch, on: torch.distributions.Distribution.set_default_validate_args(on),
    ),
    "folder of torch.hub": _Mode(
        lambda torch: torch.hub._hub_dir, lambda torch, folder: setattr(torch.hub, "_hub_dir", folder)
    ),
    "autocast": _Mode(_read_autocast, _write_autocast),
    "cudnn": _Mode(_read_cudnn, _write_cudnn),
    "sdp": _Mode(
        lambda torch: tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _SDP), _write_sdp
    ),
}
