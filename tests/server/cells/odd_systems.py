"""Scripts of test_odd_systems.py."""

# %% sockets in a rank
import multiprocessing

import torch
from torch.utils.data import DataLoader

from nbdist import in_ddp


def work():
    with multiprocessing.Manager() as manager:
        rows = len(manager.list([1, 2]))
    return rows, sum(float(batch.sum()) for batch in DataLoader(torch.ones(8, 100), num_workers=1))


print(in_ddp(1, work))

# %% a project with names of the standard library
import code
import pathlib
import queue
import random
import selectors
import sys

from nbdist import in_ddp, parallel_map

project = pathlib.Path("project")
project.mkdir()
for name in ("queue", "types", "code", "signal", "random", "selectors"):
    (project / f"{name}.py").write_text(f"open({name!r}, 'w').close()\n")
sys.path.insert(0, str(project))


def imports():
    import code
    import queue

    return queue.Queue, code.interact, sys.path[0] == str(project.absolute())


assert random.random() < 1 and selectors.SelectSelector
assert in_ddp(2, imports) == (queue.Queue, code.interact, True)
assert parallel_map(lambda n: imports()[0].__name__, [1], 1, progress=False) == ["Queue"]
assert not [name for name in ("queue", "types", "code", "signal", "random", "selectors") if pathlib.Path(name).exists()]
print("done")

# %% a module of the notebook's own that has a name of the standard library
import pathlib
import sys

from nbdist import Session

pathlib.Path("statistics.py").write_text("def answer(): return 'own'\n")
sys.path.insert(0, "")
sys.modules.pop("statistics", None)
import statistics

with Session(1) as session:
    print(session.run(lambda: statistics.answer()), session.run(statistics.answer))

# %% a server that imports a module of the folder
import sys

from nbdist import in_ddp
from nbdist.engines import forkserver

forkserver.server().ask("preload", ["noisy_module"], sys.path)
print(in_ddp(2, lambda: 5))
