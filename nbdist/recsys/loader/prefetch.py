"""Batches made ahead in a thread and copied to the GPU while the model computes."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .batches import Block

T = TypeVar("T")

_POLL = 0.05  # seconds until a thread that waits looks whether it is still wanted


class _End(NamedTuple):
    error: BaseException | None = None


def ahead(items: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """Yield the same items, made in a background thread, up to `depth` of them in advance. An exception is raised in
    the place of its item.

    The thread ends with the iterator, even if the iterator is closed early. With depth 0 there is no thread.
    """
    if depth == 0:
        yield from items
        return
    made: queue.Queue[T | _End] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: T | _End) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                return made.put(item, timeout=_POLL)

    def make() -> None:
        try:
            with contextlib.closing(items):
                for item in items:
                    put(item)
                    if stop.is_set():
                        return
            put(_End())
        except BaseException as error:  # it belongs to whoever iterates
            put(_End(error))

    thread = threading.Thread(target=make, name="nbdist loader", daemon=True)
    thread.start()
    try:
        while True:
            item = made.get()
            if not isinstance(item, _End):
                yield item
                del item  # not kept while the next one is made
            elif item.error is not None:
                raise item.error
            else:
                return
    finally:
        stop.set()
        thread.join()


def on_device(
    blocks: Generator[Block, None, None], device: torch.device, depth: int, pin_memory: bool
) -> Generator[Block, None, None]:
    """Yield the blocks on `device`, made and copied in advance; on a GPU, in a stream of its own, from pinned memory.

    Args:
        blocks: The blocks, in CPU memory or on the device already.
        device: The device of the blocks.
        depth: The number of blocks in advance. 0: each block is made and copied when it is needed.
        pin_memory: Whether blocks that stay on the CPU are in page-locked memory; blocks for a GPU always are.
    """
    if device.type != "cuda":
        yield from ahead((_placed(block, device, pin_memory) for block in blocks), depth)
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the source may have been computed there

    def copies() -> Generator[tuple[Block, torch.cuda.Event], None, None]:
        # The current stream is a thread's own: it is set around each piece of work and not across a yield.
        while True:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                block = next(blocks, None)
                if block is None:
                    return
                copy = _placed(block, device, True)
                done = torch.cuda.Event()
                done.record(stream)
            yield copy, done

    for block, done in ahead(copies(), depth):
        current = torch.cuda.current_stream(device)
        current.wait_event(done)

        def used(tensor: Tensor, current: torch.cuda.Stream = current) -> Tensor:
            tensor.record_stream(current)  # its memory is not given away before that stream is done with it
            return tensor

        yield block.map(used)


def _placed(block: Block, device: torch.device, pin_memory: bool) -> Block:
    def place(tensor: Tensor) -> Tensor:
        if pin_memory and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return block.map(place)
