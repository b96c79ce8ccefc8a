"""The page of what people do in notebooks, made from the cells that test it.

`python tests/docs/habits.py` writes docs/what-people-do.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "what-people-do.md"
sys.path.insert(0, str(Path(__file__).parents[1]))

from cells import cells  # noqa: E402

CELLS = cells("cells/habits.py")
#: Cells of other tests that show habits of this kind: the file, the cell, what people do, what happens, the reports.
ELSEWHERE = [
    (
        "capture/cells/torch_objects.py",
        "modules that are kinds of modules of their own",
        "`torch.backends.cudnn.benchmark = True`, `torch.ops`, lazily loaded modules",
        "They are found by their names in the rank.",
        "ray-project/ray#8569, pytorch/pytorch#48832",
    ),
    (
        "capture/cells/torch_objects.py",
        "TorchScript: functions, traced models, and parameters that an optimizer has",
        "Functions under `torch.jit.script`, traced and scripted models",
        "They arrive as `torch.jit.save` writes them; an optimizer has the same parameters.",
        "ray-project/ray#12677",
    ),
    (
        "capture/cells/torch_objects.py",
        "an operator of a cell, by its own name and by torch's",
        "An operator of a cell (`torch.library.custom_op`)",
        "It is registered in the rank, with its kernels and gradients.",
        "pytorch/pytorch#128535",
    ),
    (
        "capture/cells/torch_objects.py",
        "a loader whose workers wait for the next epoch",
        "A look at one batch of a `DataLoader(persistent_workers=True)`, then training with it",
        "The loader arrives without the workers of the notebook, and starts its own.",
        "",
    ),
    (
        "capture/cells/torch_objects.py",
        "models come back without DistributedDataParallel",
        "`return model`, where the model is wrapped in `DistributedDataParallel`",
        "The model inside comes back, and a warning says so; an optimizer has its parameters.",
        "pytorch/pytorch#76927, pytorch/pytorch#12168",
    ),
    (
        "capture/cells/torch_objects.py",
        "parameters that FSDP2 has sharded come back whole",
        "`return model` after FSDP2's `fully_shard`, in each rank",
        "The model and its optimizer come back with whole parameters.",
        "pytorch/pytorch#136336",
    ),
    (
        "capture/cells/torch_objects.py",
        "models that FSDP1 has wrapped come back whole and without it",
        "`return model` after `FullyShardedDataParallel`, in each rank, or its state in a later call",
        "The model is returned without it and with whole parameters, and a warning says so; an optimizer has them, "
        "too.",
        "pytorch/pytorch#67950, pytorch/pytorch#122903",
    ),
    (
        "capture/cells/settings.py",
        "registries of libraries",
        "A class or function that a cell registers in a library: `copyreg.pickle`, `Number.register`, "
        "`singledispatch`, constructors of YAML, file systems, nodes of pytrees",
        "It is registered in the rank, and taken out there when the notebook takes it out.",
        "",
    ),
    (
        "capture/cells/settings.py",
        "what a cell registers and patches after a call",
        "A colormap that is registered, or a class of a library that is patched, after a call of the same cell or in a "
        "loop with calls",
        "The next call has it.",
        "ray-project/ray#12627",
    ),
    (
        "capture/cells/assigned.py",
        "variables with a module's objects",
        "An object of one's own module, changed after `from settings import OPTIONS`",
        "Functions of the module have the notebook's values in ranks, too, and both names lead to one object.",
        "ray-project/ray#15946, wmayner/pyphi#38",
    ),
    (
        "capture/cells/settings.py",
        "modes of Python",
        "A hook or mode of Python: `os.umask`, `gc.disable()`, a handler of SIGUSR1, `sys.argv`, a name in `builtins`",
        "It holds in ranks, and is taken back with the notebook's.",
        "",
    ),
    (
        "capture/cells/settings.py",
        "context variables",
        "A `contextvars.ContextVar` as a global",
        "It arrives with its value; what a rank sets stays there.",
        "",
    ),
    (
        "capture/cells/partial.py",
        "a part that cannot be sent",
        "Returning what holds an open file, a generator or another thing that cannot be sent",
        "`CaptureError` names it, and its `value` (`sys.last_value.value`) is all else that the function returned.",
        "",
    ),
    (
        "capture/cells/shared.py",
        "managers and their proxies",
        "Results through `multiprocessing.Manager().dict()` and `.Queue()`",
        "They are shared.",
        "dask/distributed#9122, python/cpython#139801",
    ),
    (
        "capture/cells/shared.py",
        "memory that is sent as a copy is said; a block that is opened by its name is shared",
        "A tensor after `share_memory_()`, an array in a `SharedMemory` block",
        "It is sent as a copy, and a warning says so. A block that the function opens by its name is shared.",
        "pytorch/pytorch#68986",
    ),
    (
        "capture/cells/arrival.py",
        "functions that a decorator of wrapt has wrapped",
        "Functions under a decorator of wrapt",
        "They arrive with the decorator.",
        "",
    ),
    (
        "capture/cells/by_value.py",
        "classes derived from threading.local, and what holds one, such as a console of rich",
        "A `rich` console or progress bar of an earlier cell",
        "It arrives; what a rank prints with it is in the cell.",
        "",
    ),
    (
        "capture/cells/by_value.py",
        "structures and unions of ctypes",
        "Structures of ctypes that a cell defines",
        "They arrive, and come back; those with pointers are refused by name.",
        "AlexeyAB/darknet#1490",
    ),
    (
        "capture/cells/by_value.py",
        "names by way of the module that a cell runs in",
        "`from __main__ import f`, or `__main__.f`, in a function",
        "The rank has the notebook's `f`.",
        "uqfoundation/pathos#118",
    ),
    (
        "capture/cells/settings.py",
        "modes of Python, NumPy and torch that only threads, sockets, files and loaders show",
        "`socket.setdefaulttimeout` in an earlier cell, for downloads",
        "It holds in ranks. The connections between notebook and ranks have no timeout.",
        "lijiejie/BBScan#13",
    ),
    (
        "kernel/cells/front_ends.py",
        "nbconvert",
        "`jupyter nbconvert --execute` of a notebook with calls",
        "Prints, plots and values are in the notebook that is written, and an exception has its own type.",
        "",
    ),
]

#: What was tried by hand, with packages that the tests do without: what people do, what happens, the reports.
BY_HAND = [
    (
        "A resolver of OmegaConf 2.4.0 that a cell registers",
        "It is registered in ranks. Sessions follow `replace=True` and `clear_resolver` from the next cell on.",
        "hydra-ecosystem/hydra#861, facebookresearch/mmf#370",
    ),
    (
        "`gymnasium.register` (1.4.0) with a class of the notebook",
        "The environment is registered in ranks.",
        "ray-project/ray#4591",
    ),
    (
        "`AutoConfig.register` and `AutoModel.register` of transformers 5.24.0, a `Registry` of fvcore 0.1.5",
        "The classes are registered in ranks, and models come back.",
        "open-mmlab/mmcv#2975, aim-uofa/AdelaiDet#186",
    ),
    (
        "The logger of loguru 0.7.3, with a file, of an earlier cell",
        "What ranks log is in the cell, and at the end of the file.",
        "Delgan/loguru#831, Delgan/loguru#498",
    ),
    (
        "A `SummaryWriter` (tensorboard 2.21.0) of an earlier cell, used in ranks",
        "A rank that writes has its own file of events in the same folder. It is complete when the call has ended.",
        "facebookresearch/moco#35",
    ),
    (
        "mlflow-skinny 3.17.2: a tracking URI, an experiment, a run and autolog of an earlier cell",
        "All hold in ranks: what ranks log is in the notebook's run, `nested=True` begins a run below it, and the "
        "notebook ends it.",
        "mlflow/mlflow#5817, mlflow/mlflow#3711, ludwig-ai/ludwig#1768",
    ),
    (
        "`wandb.init` (0.30) of an earlier cell, and `wandb.log` in ranks",
        "`wandb.log` asks for `wandb.init()`; `run.log` of the notebook's run arrives.",
        "wandb/wandb#4990",
    ),
    (
        "A component, a factory or an extension attribute of a cell for spaCy 3.8",
        "Pipelines arrive, and pipelines that ranks make have them.",
        "explosion/spaCy#4903, explosion/spaCy#9999, explosion/spaCy#11213",
    ),
    (
        "`set_verbosity` of optuna 4 and others, for a library that a session imports later",
        "The level holds in ranks.",
        "optuna/optuna#4529",
    ),
    (
        "Options of xarray, XGBoost, dask and JAX (`set_options`, `set_config`, `config.set`, `config.update`)",
        "They hold in ranks.",
        "",
    ),
    (
        "`structlog.configure` with a processor of the notebook",
        "It holds in ranks.",
        "apache/tvm#16715",
    ),
    (
        "A program of `torch.export`",
        "It arrives, can be called, and comes back.",
        "pytorch/pytorch#185170, pytorch/pytorch#186418",
    ),
    (
        "Notebooks run by papermill 2.7.0 in the workers of `parallel_map`",
        "They run, two at a time.",
        "nteract/papermill#552",
    ),
    (
        "A `Dataset` of datasets 5.2.0 as a global, and its `map(num_proc=2)` in a rank",
        "It arrives, and the rank's own processes map it.",
        "",
    ),
    (
        "A typed list, a typed dictionary, a `jitclass` or a stencil of numba 0.68; a `Struct` of msgspec",
        "They are refused by name.",
        "numba/numba#8791, numba/numba#1846, msgspec/msgspec#394",
    ),
    (
        "A file of h5py 3.16.0 or a connection of duckdb 2.0.1 as a global",
        "It is refused by name: open it in the function.",
        "",
    ),
]


def _links(reports: str) -> str:
    """References such as `owner/name#5` as links."""
    return re.sub(r"([\w.-]+/[\w.-]+)#(\d+)", r"[\1#\2](https://github.com/\1/issues/\2)", reports)


_HEAD = ("| what people do | what happens | reported, for other projects |", "|---|---|---|")


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    return [f"| {habit} | {happens} | {_links(reported)} |" for habit, happens, reported in rows]


def _said(text: str, what: str) -> str:
    found = re.search(rf"^# {what}: (.+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"a cell says nothing of what {what}")
    return found[1]


def needs(case: str) -> list[str]:
    """The libraries that a cell imports and that may be missing."""
    libraries = "pydantic|sklearn|joblib|matplotlib|PIL|numba|sqlalchemy|tqdm|lightning|optuna"
    return re.findall(rf"^(?:import|from) ({libraries})", CELLS[case], re.MULTILINE)


def page() -> str:
    """The page's text. Raises `ValueError` for a cell that says nothing, `KeyError` for one that is gone."""
    rows = [(name, _said(text, "happens"), _said(text, "reported")) for name, text in CELLS.items()]
    for file, cell, habit, happens, reported in ELSEWHERE:
        cells(file)[cell]
        rows.append((habit, happens, reported))
    lines = [
        "# What people do, and what happens",
        "",
        "After this page you know what happens when you do what others have done in their notebooks. The rows are from "
        "public reports of other projects, and each is a test. `python tests/docs/habits.py` makes this page.",
        "",
        *_HEAD,
        *_table(rows),
        "",
        "Tried by hand, on 2026-11-28 in a kernel (Python 3.11, torch 2.13.0, CPUs), with packages that the tests do "
        "without:",
        "",
        *_HEAD,
        *_table(BY_HAND),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
