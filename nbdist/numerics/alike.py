"""Comparisons between ranks, by hashes: parameters, buffers and random states must be equal; the rows of a batch must
differ.
"""

from __future__ import annotations

import collections
import contextlib
import random
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..devices import collective_device
from ..errors import RankMismatch
from ..system.interrupts import undivided_context
from .finite import tensors_in
from .hooks import AfterForward, Models, around_steps, in_training, parameters_of
from .report import plain

#: Packages whose modules have other parts of a table, or of a parameter, on each rank.
_SHARDED = ("torchrec.", "torch.distributed.fsdp.", "fairscale.")
#: The modules of these that have only what is inside them.
_WHOLE = {"DistributedModelParallel", "EmbeddingBagCollection", "EmbeddingCollection"}
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_HELP = {
    "parameter": "let all ranks begin with the same weights and take the same steps: DistributedDataParallel sends "
    "rank 0's weights at its start, and averages the gradients",
    "buffer": "DistributedDataParallel(broadcast_buffers=True), SyncBatchNorm, or dist.broadcast(buffer, 0) before the "
    "buffer is used",
}


class RankCheck:
    """The comparisons of one call.

    Args:
        every: The number of steps between two comparisons. There is also one after each of the first two steps.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._models = Models()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._due: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inputs: tuple[Any, Any] | None = None
        self._rows: list[int] = []  # hashes of the ranks' rows at the last comparison
        self._same: list[str] | None = None  # random states that were alike at the first comparison

    def called(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Remember the arguments of a model's call. A hook of all modules calls this."""
        if self._models.is_inner(module) or not in_training():
            return
        self._models.is_new(module)
        if next(module.parameters(), None) is not None:  # and so no loss function
            self._inputs = args, kwargs

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record that a step begins."""
        self._due.add(optimizer)

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Count a step, and compare the ranks if it is time."""
        if optimizer not in self._due:  # of a base class, which was counted
            return
        self._due.discard(optimizer)
        self._steps[optimizer] = step = self._steps.get(optimizer, 0) + 1
        if step <= 2 or step % self._every == 0:
            self._compare(step, optimizer)

    @torch.no_grad()
    def _compare(self, step: int, optimizer: Any) -> None:
        tensors = list(self._alike(optimizer))
        states = _random_states()
        hashes = [number for _, _, one in tensors for number in _hashes(one)]
        rows = 0 if self._inputs is None else _hash_of_all(self._inputs)
        own = [step, len(tensors), zlib.crc32(repr([name for _, name, _ in tensors]).encode()), len(states)]
        every = _gather([*own, rows, *states.values()]) if dist.get_world_size() > 1 else []
        if not every:
            return
        for place, what in enumerate(("steps", "numbers of parameters", "names of parameters")):
            if len({one[place] for one in every}) > 1:
                self._fail(step, f"the {what} are not the same", "", [one[place] for one in every], "parameter")
        found = _gather(hashes)
        for number, (kind, name, _) in enumerate(tensors):
            values = [tuple(one[2 * number : 2 * number + 2]) for one in found]
            if len(set(values)) > 1:
                self._fail(step, f"{kind} `{name}` is not the same", name, values, kind)
        self._compare_rows(step, [one[4] for one in every])
        if len({one[3] for one in every}) == 1:
            self._compare_states(step, dict(zip(states, zip(*(one[5:] for one in every), strict=True), strict=True)))

    def _fail(self, step: int, what: str, tensor: str, values: Sequence[Any], kind: str) -> None:
        most = collections.Counter(values).most_common(1)[0][0]
        other = [rank for rank, value in enumerate(values) if value != most]
        rest = [rank for rank, value in enumerate(values) if value == most]
        text = f"after step {step}, {what} on all ranks: {_ranks(other)} differ{'s' * (len(other) == 1)} from "
        text += f"{_ranks(rest)}.\n  What helps: {_HELP[kind]}."
        raise RankMismatch(text, step=step, tensor=tensor, ranks=other)

    def _compare_rows(self, step: int, rows: list[int]) -> None:
        """Raise if the ranks had the same rows at two comparisons in a row, and the rows have changed in between."""
        before, self._rows = self._rows, rows
        if not before or not rows[0]:
            return
        for value, count in collections.Counter(rows).items():
            ranks = [rank for rank, own in enumerate(rows) if own == value]
            if count > 1 and len({before[rank] for rank in ranks}) == 1 and before[ranks[0]] != value:
                raise RankMismatch(
                    f"at step {step}, {_ranks(ranks)} train on the same rows, as at the comparison before.\n"
                    "  What helps: give each rank its own part of the rows, by DistributedSampler or a loader of "
                    "nbdist.recsys.loader.",
                    step=step,
                    tensor="rows",
                    ranks=ranks,
                )

    def _compare_states(self, step: int, states: dict[str, tuple[int, ...]]) -> None:
        """Show, once, which random states have become different, and that dropout masks are equal."""
        alike = [name for name, values in states.items() if len(set(values)) == 1]
        first, self._same = self._same is None, alike if self._same is None else self._same
        lost = [name for name in self._same if name not in alike]
        if lost:
            self._same = [name for name in self._same if name not in lost]
            values = states[lost[0]]
            most = collections.Counter(values).most_common(1)[0][0]
            other = [rank for rank, value in enumerate(values) if value != most]
            _say(
                f"after step {step}, the random state of {' and '.join(lost)} is no longer the same on all ranks: "
                f"{_ranks(other)} drew other numbers. What is drawn from it, such as an order of rows, differs"
            )
        if first and "torch" in alike and any(_drops(model) for model in self._models.all):
            _say("dropout masks are the same on all ranks; seed_ranks=True makes them different")

    def _alike(self, optimizer: Any) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the kind, name and value of each object that must be equal on all ranks."""
        models = list(self._models.all)
        names = {id(one): plain(name) for model in models for name, one in model.named_parameters()}
        left_out = {id(one) for model in models for one in _sharded(model)}
        for number, one in enumerate(parameters_of(optimizer)):
            if id(one) not in left_out and type(one) in (nn.Parameter, Tensor):
                yield "parameter", names.get(id(one), f"{number} of {type(optimizer).__name__}"), one
        for model in models:
            for name, one in model.named_buffers():
                if id(one) not in left_out and type(one) is Tensor:
                    yield "buffer", plain(name), one


def _sharded(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers that may differ: sharded ones, and buffers that rank 0 broadcasts at each
    step."""
    for one in model.modules():
        kind = type(one)
        if kind.__module__.startswith(_SHARDED) and kind.__name__ not in _WHOLE:
            yield from one.parameters()
            yield from one.buffers()
        elif isinstance(one, DistributedDataParallel) and one.broadcast_buffers:
            yield from one.buffers()


def _drops(model: nn.Module) -> bool:
    return any(isinstance(one, nn.modules.dropout._DropoutNd) and one.training and one.p for one in model.modules())


def _hashes(tensor: Tensor) -> list[int]:
    """Return two numbers that change if an element changes, or if two elements change places."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return [0, 0]
    flat = tensor.detach().contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    bits = flat.view(_INTEGERS[flat.element_size()])
    return torch.stack([bits.sum(dtype=torch.int64), bits[1::2].sum(dtype=torch.int64)]).tolist()


def _hash_of_all(values: Any) -> int:
    """Return one hash of all tensors in the arguments of a model."""
    found = [number for one in tensors_in(list(values)) for number in _hashes(one)]
    return zlib.crc32(repr(found).encode()) + 1 if any(found) else 0


def _random_states() -> dict[str, int]:
    states = {"random": repr(random.getstate()).encode(), "torch": torch.get_rng_state().numpy().tobytes()}
    if "numpy" in sys.modules:
        _, keys, *rest = sys.modules["numpy"].random.get_state()
        states["NumPy"] = keys.tobytes() + repr(rest).encode()
    return {name: zlib.crc32(state) for name, state in states.items()}


def _gather(numbers: Sequence[int]) -> list[list[int]]:
    """Return the hashes of all ranks. Each rank must have the same number of hashes."""
    own = torch.tensor(numbers, dtype=torch.int64, device=collective_device())
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [one.tolist() for one in found]


def _ranks(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"nbdist: {text}", file=sys.stderr)


@undivided_context
def rank_check(every: int) -> Iterator[None]:
    """Compare the ranks in the `with` block, after steps 1 and 2 and then after every `every` steps. Raises
    `RankMismatch`."""
    if not dist.is_initialized():
        yield
        return
    check = RankCheck(every)
    with contextlib.ExitStack() as stack:
        AfterForward(stack, check.called)
        around_steps(stack, check.before_step, check.after_step)
        yield
