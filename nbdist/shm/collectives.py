"""Collectives of CPU ranks on one machine in shared memory.

gloo uses loopback TCP and several threads for each rank: one number takes a millisecond on two busy cores, and half a
megabyte takes as long as the backward pass of a small model. Here, a rank writes its part into shared memory and its
size into each other rank's pipe, and waits for the sizes of the others: some hundredths of a millisecond.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..system.annotations import annotated
from ..system.cores import usable_cores
from ..system.free_memory import check_fits
from ..system.segments import Segment

#: Bytes of a part that are exchanged at once: they stay in the processor's cache.
_PIECE = 1 << 20
#: Bytes at the head of what one rank sends to another, for its size: a line of the processor's cache.
_HEAD = 64
#: Seconds that a rank looks again and again whether the others are there, if there is a core for each: waking up takes
#: 30 µs.
_LOOKS = 50e-6
#: Numbers that ranks send one another: for parts that may differ in size, and to end the wait of a rank.
_UNEQUAL, _ABORTED = 1 << 62, b"\xff" * 8

#: Seconds that this process has waited for other ranks here.
waited = 0.0


class _File(NamedTuple):
    """An open file, described for other processes of the machine: its descriptor in this process, and its identity."""

    fd: int
    identity: tuple[int, int]


class _Offer(NamedTuple):
    """The descriptors that a rank offers to the others: the writing ends of its pipes, and rank 0's memory."""

    machine: str
    pid: int
    pipes: list[_File]
    memory: _File | None


class SharedCollectives:
    """Collectives of the default process group, whose ranks are all on this machine.

    As with torch's own collectives, all ranks must call the same methods in the same order. After a failure, and after
    the end of the process group, each method raises `RuntimeError`.
    """

    def __init__(self, parts: torch.Tensor, inboxes: list[int], outboxes: list[list[int]]) -> None:
        self._parts = parts  # by parity of the piece's number, and by rank: bytes
        self._inboxes, self._outboxes = inboxes, outboxes  # by parity; of each other rank, by parity
        self._polls = [select.poll() for _ in inboxes]
        for poll, inbox in zip(self._polls, inboxes, strict=True):
            os.set_blocking(inbox, False)
            poll.register(inbox, select.POLLIN)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._looks = _LOOKS if self.size <= len(usable_cores()) else 0.0
        width = _PIECE // self.size // _HEAD * _HEAD
        # By parity, sender and receiver. NumPy takes a tenth of the time that torch takes for small ones.
        self._slots = parts.numpy()[..., : self.size * width].reshape(2, self.size, self.size, width)
        self._heads = self._slots[..., :16].view(np.int64)
        self._group = weakref.ref(dist.group.WORLD)
        self._count = 0  # of pieces that were exchanged; negative after a failure
        self._close = weakref.finalize(self, _close, [*inboxes, *(fd for fds in outboxes for fd in fds)])
        self._close.atexit = False
        self._closing = threading.Lock()  # what is written to end a wait must not go where a closed descriptor was

    @property
    def usable(self) -> bool:
        """Return True if no collective has failed and the process group is still the same."""
        return self._count >= 0 and self._group() is dist.group.WORLD

    @property
    def turns(self) -> int:
        """Return the number of exchanges, which is the same on all ranks; negative after a failure."""
        return self._count

    def mean_(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Replace contiguous float tensors by their mean over all ranks, with the same bits on each rank. Return the
        first tensor."""
        with annotated("nbdist:mean"):
            for turn in _turns([tensor.view(-1) for tensor in tensors]):
                with self._exchanged(*turn) as exchanged:
                    for part, parts in zip(turn, exchanged, strict=True):
                        add_up(parts, 0, out=part).div_(self.size)
        return tensors[0]

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the `tensor` of each rank. All must have the same shape."""
        flat = tensor.reshape(-1)
        gathered = flat.new_empty(self.size, len(flat))
        width = _PIECE // tensor.element_size()
        with annotated("nbdist:gather"):
            for part, whole in zip(flat.split(width), gathered.split(width, 1), strict=True):
                with self._exchanged(part) as (parts,):
                    whole.copy_(parts)
        return [one.view(tensor.shape) for one in gathered]

    def reduce_(self, tensor: torch.Tensor, reduce: Callable[..., object]) -> torch.Tensor:
        """Replace a contiguous `tensor` by the result of `reduce`, such as `torch.amax`, over all ranks' values; return
        it."""
        with annotated("nbdist:reduce"):
            for part in tensor.detach().view(-1).split(_PIECE // tensor.element_size()):
                with self._exchanged(part) as (parts,):
                    reduce(parts, 0, out=part)
        return tensor

    def all_to_all(self, outputs: Sequence[np.ndarray | None], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Send each rank its part of `inputs`, and receive the parts of all ranks in `outputs`. The parts may differ in
        size.

        Args:
            outputs: The memory for the bytes from each rank, shape (bytes,). None: a new array.
            inputs: The bytes for each rank, shape (bytes,).

        Returns:
            The bytes from each rank.
        """
        # Each sender has a slot for each receiver: how much comes in all, how much it sends to anyone at most, and as
        # much as there is room for. What does not fit comes in further rounds.
        me, others = self.rank, [rank for rank in range(self.size) if rank != self.rank]
        room, start, most = self._slots.shape[3] - _HEAD, 0, max(map(len, inputs))
        received = dict(enumerate(outputs))
        mine = received[me]
        if mine is None:
            received[me] = inputs[me]
        else:
            mine[:] = inputs[me]
        with annotated("nbdist:all_to_all"):
            while start == 0 or start < most:
                with self._turn(_UNEQUAL) as (parity, meet):
                    for rank in others:
                        part = inputs[rank][start : start + room]
                        self._heads[parity, me, rank] = len(inputs[rank]), most
                        self._slots[parity, me, rank, _HEAD : _HEAD + len(part)] = part
                    meet()
                    for rank in others:
                        coming, largest = self._heads[parity, rank, me].tolist()
                        there = received[rank]
                        if there is None:
                            there = received[rank] = np.empty(coming, np.uint8)
                        if coming != len(there):
                            raise RuntimeError(f"rank {rank} sends {coming} bytes, and {len(there)} are expected here")
                        part = there[start : start + room]
                        part[:] = self._slots[parity, rank, me, _HEAD : _HEAD + len(part)]
                        most = max(most, largest)
                start += room
        return [one for one in received.values() if one is not None]

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""
        with annotated("nbdist:barrier"), self._turn(0) as (_, meet):
            meet()

    @contextlib.contextmanager
    def _exchanged(self, *mine: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Yield, for each tensor, the values of all ranks, one in each row, valid until the end of the block."""
        with self._turn(sum(one.nbytes for one in mine)) as (parity, meet):
            exchanged: list[torch.Tensor] = []
            start = 0
            for one in mine:
                exchanged.append(self._parts[parity, :, start : start + one.nbytes].view(one.dtype))
                exchanged[-1][self.rank].copy_(one)
                start += padded(one.nbytes)
            meet()
            yield exchanged

    @contextlib.contextmanager
    def _turn(self, size: int) -> Iterator[tuple[int, Callable[[], None]]]:
        """Begin an exchange: yield the half of the memory for it, and a function to call between writing and reading.

        Args:
            size: The bytes of each rank's part, equal on all ranks, or `_UNEQUAL`.
        """
        if not self.usable:
            raise RuntimeError("an earlier collective has failed, or the process group has ended: wrap the model again")
        # The next piece goes into the other half while ranks still read this one. The one after it may take the place
        # of this: a rank that has sent the next has read this.
        count, self._count = self._count, -1  # for good, if this is interrupted: the ranks are out of step then
        parity = count % 2

        def meet() -> None:
            mark = size.to_bytes(8, "little")
            for outbox in self._outboxes:
                os.write(outbox[parity], mark)
            wanted = mark * (self.size - 1)
            received = b""
            begin = time.perf_counter()
            while len(received) < len(wanted):
                try:
                    more = os.read(self._inboxes[parity], len(wanted) - len(received))
                except BlockingIOError:
                    if time.perf_counter() - begin >= self._looks:
                        self._polls[parity].poll()
                    continue
                if not more:
                    raise RuntimeError("connection closed by peer: another rank has ended")
                received += more
            global waited
            waited += time.perf_counter() - begin
            if _ABORTED in received:
                raise RuntimeError("connection closed by peer: this rank is to leave its process group")
            if received != wanted:
                raise RuntimeError(
                    f"the ranks' tensors differ in size, or they are at different collectives: {size} bytes here"
                )

        yield parity, meet
        self._count = count + 1

    def memory(self, size: int) -> mmap.mmap:
        """Map memory that all ranks share, filled with zeros. The `size` in bytes must be equal on all ranks.

        Raises `MemoryError` if they do not fit.
        """
        if self.rank == 0:
            check_fits(size, "memory that all ranks share")
        segment = Segment.create(size if self.rank == 0 else 0)
        with contextlib.closing(segment):
            offers: list[Any] = [(os.getpid(), _file(segment.fd)) if self.rank == 0 else None]
            dist.broadcast_object_list(offers)
            pid, file = offers[0]
            fd = _open_there(pid, file, os.O_RDWR)
            try:
                return mmap.mmap(fd, size)
            finally:
                os.close(fd)
                self.barrier()  # no rank closes what another has yet to open

    def abort(self) -> None:
        """Abort, from any thread, a collective that waits here. It fails, and so do all later ones."""
        self._count = -1
        with self._closing:
            for inbox in self._inboxes if self._close.alive else ():
                fd = os.open(f"/proc/self/fd/{inbox}", os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.write(fd, _ABORTED * self.size)  # all that it may wait for, and more
                finally:
                    os.close(fd)

    def close(self) -> None:
        """Close the descriptors. No collective may be waiting."""
        self._count = -1
        with self._closing:
            self._close()


def open_shared_collectives() -> SharedCollectives | None:
    """Return the collectives of the default process group; None if ranks cannot share memory. All ranks must call
    it."""
    if sys.platform != "linux" or dist.get_world_size() == 1:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    length = 2 * size * _PIECE
    with contextlib.ExitStack() as opened, contextlib.ExitStack() as kept:
        segment = Segment.create(length if rank == 0 else 0)
        opened.callback(segment.close)
        reads, writes = zip(os.pipe(), os.pipe(), strict=True)
        for fd in writes:
            opened.callback(os.close, fd)
        for fd in reads:
            kept.callback(os.close, fd)
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read()
        offer = _Offer(machine, os.getpid(), [_file(fd) for fd in writes], _file(segment.fd) if rank == 0 else None)
        offers: list[Any] = [None] * size
        dist.all_gather_object(offers, offer)
        made = torch.ones(1, device="cpu")
        outboxes: list[list[int]] = []
        parts = torch.empty(0, device="cpu")
        try:
            for other in range(size):
                if other != rank:
                    outboxes.append([])
                    for file in offers[other].pipes:
                        outboxes[-1].append(open_offered(offers[other], file, os.O_WRONLY, machine))
                        kept.callback(os.close, outboxes[-1][-1])
            memory = open_offered(offers[0], offers[0].memory, os.O_RDWR, machine)
            opened.callback(os.close, memory)
            parts = torch.frombuffer(mmap.mmap(memory, length), dtype=torch.uint8).view(2, size, _PIECE)
        except OSError:  # another machine, container or user
            made.zero_()
        dist.all_reduce(made, dist.ReduceOp.MIN)  # and no rank closes what another has yet to open
        if not made:
            return None
        kept.pop_all()
        return SharedCollectives(parts, list(reads), outboxes)


def add_up(parts: torch.Tensor, dim: int, *, out: torch.Tensor) -> torch.Tensor:
    """Sum the values of all ranks as `torch.sum` does over the first dimension; for two ranks in half the time."""
    return torch.add(*parts, out=out) if len(parts) == 2 else torch.sum(parts, dim, out=out)


def _turns(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield views of parts of these flat tensors. Each part is small enough to be exchanged in one piece."""
    turn: list[torch.Tensor] = []
    room = _PIECE
    for tensor in tensors:
        rest = tensor
        while len(rest) or not turn:
            if not room:
                yield turn
                turn, room = [], _PIECE
            part, rest = rest.tensor_split([room // rest.element_size()])
            turn.append(part)
            room -= padded(part.nbytes)
    yield turn


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a contiguous tensor as a view, shape (bytes,)."""
    # A single number counts as contiguous whatever its stride.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def padded(size: int) -> int:
    """Round a number of bytes up, so that the following data start at a cache line."""
    return -(-size // _HEAD) * _HEAD


def _file(fd: int) -> _File:
    found = os.fstat(fd)
    return _File(fd, (found.st_dev, found.st_ino))


def open_offered(offer: _Offer, file: _File, flags: int, machine: str) -> int:
    """Open a file of another process. Raises `OSError` if it is not the offered one."""
    if offer.machine != machine:
        raise OSError("on another machine")
    return _open_there(offer.pid, file, flags)


def _open_there(pid: int, file: _File, flags: int) -> int:
    fd = os.open(f"/proc/{pid}/fd/{file.fd}", flags | os.O_CLOEXEC)
    if _file(fd).identity != file.identity:
        os.close(fd)
        raise OSError("another file: the processes do not see each other")
    return fd


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
