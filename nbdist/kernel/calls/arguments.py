"""Checks of the arguments of `in_ddp` and `Session`, before any process starts."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from typing import Any

from ...capture.foreign import is_a, name_of
from ...capture.imports import parse_imports
from ...capture.need import resolve_need
from ...checks import check_choice, check_count, check_function, check_mapping, check_number, nearest, shown

#: The values of `output=`.
OUTPUTS = ("rank0", "all", "tabs", "none")
#: Steps from one comparison of the ranks to the next, unless `check=` says otherwise.
COMPARED_EACH = 10
#: Backends of torch and of packages that torch lists; others are looked up in torch, which takes a second to import.
_BACKENDS = {"gloo", "nccl", "mpi", "ucc", "xccl", "ccl", "hccl", "cncl", "fake"}
#: Ranks per core above which the cell shows their cost.
_MANY = 16


def check_platform() -> None:
    """Raise `NotImplementedError` where ranks cannot be forked."""
    if sys.platform == "win32":
        raise NotImplementedError(
            "nbdist forks its ranks, which Windows cannot do. It runs on Linux, under WSL 2, and on macOS (CPU ranks)."
        )


def many_ranks(nranks: int, cores: int) -> str:
    """Return a notice about the cost if there are many more ranks than cores; otherwise an empty string.

    A rank uses 7 to 10 MB of its own (benchmarks/results/launch.md).
    """
    if nranks <= _MANY * cores:
        return ""
    return (
        f"{nranks} ranks on {cores} core{'s' * (cores > 1)} start and work in turns, and take about "
        f"{nranks / 100:.1f} GB of memory before they do anything: in_ddp({cores}, ...) has a rank for each core"
    )


def check_min_ranks(min_ranks: Any, nranks: int, restarts: int) -> None:
    """Raise `TypeError` or `ValueError` for an invalid `min_ranks`: it must be None, or from 1 to `nranks` with
    `restarts` above 0.
    """
    if min_ranks is None:
        return
    check_count(min_ranks, least=1, name="min_ranks")
    if min_ranks > nranks:
        raise ValueError(f"min_ranks must be at most the number of ranks, which is {nranks}, got {min_ranks}")
    if not restarts:
        raise ValueError(f"restarts must be at least 1 with min_ranks={min_ranks}, got 0")


def check_call(fn: Any, imports: Any, need: Any) -> tuple[str, dict[str, Any]]:
    """Return the import block as one string, and the needed names with their values.

    Raises `TypeError` or `ValueError` for invalid arguments.
    """
    check_function(fn)
    _check_returns(fn)
    block = parse_imports(imports)
    return block, resolve_need(need, fn)


def _check_returns(fn: Any) -> None:
    """Raise `TypeError` for a coroutine function or a generator function: their result cannot leave the rank."""
    while is_a(fn, functools.partial):
        fn = fn.func
    name = name_of(fn)
    for code in [fn] if is_a(fn, types.FunctionType) else [fn, type(fn).__call__]:
        if _says(inspect.iscoroutinefunction, code):
            raise TypeError(
                f"{name} is a coroutine function: calling it runs nothing, and a coroutine cannot leave its rank. Pass "
                f"a function that runs it to its end: lambda: asyncio.run({name}(...))"
            )
        if _says(inspect.isgeneratorfunction, code) or _says(inspect.isasyncgenfunction, code):
            raise TypeError(
                f"{name} is a generator function, because it has a yield: calling it runs nothing, and a generator "
                f"cannot leave its rank. Pass a function that consumes it, such as lambda: list({name}(...))"
            )


def _says(asks: Callable[[Any], bool], code: Any) -> bool:
    try:
        return asks(code)
    except Exception:  # each attribute of the object raises
        return False


def check_takes(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Collection[str] = ()) -> None:
    """Raise `TypeError` if a Python function does not take these arguments.

    Args:
        fn: A function, method or partial. The arguments of other callables are not checked.
        args, kwargs: The arguments of the call.
        options: Names of a session's options. The error for one of these says where to pass it.
    """
    while is_a(fn, functools.partial):
        fn, args, kwargs = fn.func, [*fn.args, *args], {**fn.keywords, **kwargs}
    if not is_a(fn, (types.FunctionType, types.MethodType)) or "__signature__" in vars(fn):
        return
    if type(fn) is types.FunctionType and not kwargs and not fn.__code__.co_kwonlyargcount:
        most = fn.__code__.co_argcount
        if most - len(fn.__defaults__ or ()) <= len(args) <= most:
            return  # the usual case, without the cost of a signature
    signature = inspect.signature(fn, follow_wrapped=False)
    takes = signature.parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in takes):
        names = [p.name for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for wrong in kwargs:
            if wrong not in names:
                advice = (
                    f". Options come first: in_ddp.options({wrong}=...)(ngpus, fn, ...), Session(ngpus, {wrong}=...)"
                )
                advice = advice if wrong in options else nearest(wrong, names)
                raise TypeError(f"{fn.__name__}() got an unexpected keyword argument {wrong!r}{advice}")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as exc:
        raise TypeError(f"{fn.__name__}{signature} cannot be called with these arguments: {exc}") from None


def check_env(env: Any) -> None:
    """Raise `TypeError` or `ValueError` unless `env` is None or a mapping of valid names to strings."""
    if env is None:
        return
    check_mapping(env, name="env", of="names to strings")
    for name, value in env.items():
        if not isinstance(value, str):
            raise TypeError(f"env[{name!r}] must be a string, got {shown(value)}")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env must have names without '=', and no null characters, got {name!r}: {value!r}")


def check_seed(seed: Any) -> None:
    """Raise `TypeError` or `ValueError` unless `seed` is a signed integer of 64 bits, the range that torch takes."""
    if isinstance(seed, bool) or not isinstance(seed, Integral | int):
        raise TypeError(f"seed must be an integer or None, got {shown(seed)}")
    if not -(1 << 63) <= int(seed) < 1 << 63:
        raise ValueError(f"seed must be an integer of 64 bits, got {seed}")


def checks_named(check: Any) -> Sequence[str]:
    """Return the checks that `check=` asks for, as `numerics.call` takes them.

    Raises `TypeError` or `ValueError` for anything but "nan", "ranks" and "ranks:N", or a list of these.
    """
    if check is None:
        return ()
    found = []
    for one in [check] if isinstance(check, str) or not isinstance(check, Sequence) else check:
        name, colon, every = one.partition(":") if isinstance(one, str) else ("", "", "")
        if not isinstance(one, str):
            raise TypeError(f"check must be 'nan', 'ranks', 'ranks:N' or a list of these, got {shown(check)}")
        if name not in ("nan", "ranks") or (colon and (name == "nan" or not every.isdecimal() or not int(every))):
            raise ValueError(
                f"check must be 'nan', 'ranks', 'ranks:N' (each N steps) or a list of these, got {check!r}"
                f"{nearest(name, ['nan', 'ranks'])}"
            )
        found.append(f"ranks:{every or COMPARED_EACH}" if name == "ranks" else name)
    return found


def check_backend(backend: Any) -> None:
    """Raise `TypeError` or `ValueError` for a backend that torch does not know, or for unknown keys of a mapping."""
    if isinstance(backend, Mapping):
        for name, value in backend.items():
            check_choice(name, ("backend", "timeout", "pg_options", "device_id"), name="a key of backend")
            if name == "timeout":
                check_number(value, above=0, name="backend['timeout']", unit="seconds")
        backend = backend.get("backend")
        if backend is None:
            return
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string such as 'gloo', or a mapping, got {shown(backend)}")
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if name in _BACKENDS:
            continue
        import torch.distributed as dist

        if name not in dist.Backend.backend_list:
            raise ValueError(
                f"backend must be 'gloo', 'nccl', another backend of torch, or a backend of a package that the "
                f"notebook has imported, got {backend!r}"
                f"{nearest(name, ['gloo', 'nccl', *dist.Backend.backend_list])}"
            )
