"""Things that the notebook shares with other processes: each cell is a case of test_shared.py."""

# %% managers and their proxies
import multiprocessing

import torch.distributed as dist

import nbdist
from nbdist import parallel_map

manager = multiprocessing.Manager()
results, queue, inner = manager.dict(), manager.Queue(), manager.list()


def train():
    rank = dist.get_rank()
    results[rank] = "done"
    queue.put(rank)
    inner.append(manager.dict(rank=rank))
    dist.barrier()
    return sorted(one["rank"] for one in inner), results


ranks, same = in_ddp(2, train)
assert ranks == [0, 1] and dict(same) == dict(results) == {0: "done", 1: "done"}
assert sorted(queue.get(timeout=60) for _ in range(2)) == [0, 1] and len(inner) == 2
manager.shutdown()
manager = nbdist.context("multiprocessing").Manager()
own = manager.dict()


def note(x):
    own[x] = x * x


parallel_map(note, range(3), workers=2, progress=False)
assert dict(own) == {0: 0, 1: 1, 2: 4}
manager.shutdown()
del manager, own, results, queue, inner, same

# %% memory that is sent as a copy is said; a block that is opened by its name is shared
import os
import warnings
from multiprocessing import shared_memory

import numpy as np
import torch
import torch.distributed as dist

counts = torch.zeros(2).share_memory_()
block = shared_memory.SharedMemory(create=True, size=64)
array = np.ndarray((8,), dtype="f8", buffer=block.buf)
array[:] = 0


def write():
    counts[0] += 1
    array[0] += 1
    np.ndarray((8,), dtype="f8", buffer=block.buf)[1 + dist.get_rank()] = 7


with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    in_ddp(2, write)
assert sorted(str(one.message).partition(" is sent as a copy")[0] for one in said) == [
    "a tensor in shared memory (share_memory_())",
    "an array in shared memory (mmap, SharedMemory)",
]
assert array.tolist()[:3] == [0, 7, 7] and counts.tolist() == [0, 0]


def by_name():
    """End Python's resource tracker of the rank, which removes what it knows of."""
    from multiprocessing import resource_tracker

    opened = shared_memory.SharedMemory(block.name)
    shared_memory.SharedMemory(block.name).close()
    opened.close()
    tracker = resource_tracker._resource_tracker
    os.close(tracker._fd)
    os.waitpid(tracker._pid, 0)


in_ddp(1, by_name)
assert os.path.exists(f"/dev/shm/{block.name}") or not os.path.isdir("/dev/shm")
del array
block.close()
block.unlink()

# %% a batch that a loader's worker has sent is data as any other
import warnings

import torch

batch = next(iter(torch.utils.data.DataLoader(torch.arange(8), batch_size=4, num_workers=1)))
with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert in_ddp(1, lambda: batch.sum().item()) == 6
