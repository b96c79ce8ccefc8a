"""Checks that TorchRec, FBGEMM and torch belong to one release: a wrong combination fails late with an unclear error.

`python -m nbdist.recsys.versions` prints the requirements of the two packages for the installed torch, in pip's format.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_DISTRIBUTIONS = ("fbgemm-gpu", "fbgemm-gpu-cpu")
"""The distributions of the module `fbgemm_gpu`: built for CUDA, and for CPUs alone."""


def check_torchrec() -> None:
    """Check that `import torchrec` can work.

    Raises:
        ImportError: torchrec or fbgemm is missing, of a different release than torch, or cannot be loaded. The message
            names the versions to install.
    """
    import torch

    versions, pair = matching(torch.__version__), pair_for_this_torch()
    advice = (
        f"For torch {torch.__version__.partition('+')[0]}, install the pair {pair[0]} and {pair[1]}:"
        f'\n    pip install "nbdist[torchrec]" && pip install --no-deps {pair[0]} {pair[1]}'
    )
    found = {name: installed(name) for name in ("torchrec", *_DISTRIBUTIONS)}
    if importlib.util.find_spec("torchrec") is None:
        raise ImportError(f"TorchRec is not installed. {advice}")
    if importlib.util.find_spec("fbgemm_gpu") is None:
        raise ImportError(f"TorchRec needs FBGEMM, which is not installed. {advice}")
    if all(found[name] for name in _DISTRIBUTIONS):
        raise ImportError(
            f"fbgemm-gpu {found['fbgemm-gpu']} and fbgemm-gpu-cpu {found['fbgemm-gpu-cpu']} are both installed and "
            f"overwrite each other's files: pip uninstall fbgemm-gpu fbgemm-gpu-cpu. {advice}"
        )
    for name, version in found.items():
        # A build of one's own or a nightly has another name, and no version here: importing it is the test.
        if version is not None and version.split(".")[:2] != versions[name].split(".")[:2]:
            raise ImportError(f"{name} {version} is installed, which belongs to a different release of torch. {advice}")
    try:
        with _without_warnings_of_fbgemm():
            importlib.import_module("fbgemm_gpu")
            importlib.import_module("torchrec")
    except ModuleNotFoundError as error:
        raise ImportError(f"TorchRec needs the module {error.name}, which is not installed. {advice}") from error
    except Exception as error:  # OSError, AttributeError, RuntimeError: whatever a library of the wrong build runs into
        raise ImportError(f"TorchRec or FBGEMM cannot be loaded: {type(error).__name__}: {error}. {advice}") from error


def check_gpu(device: torch.device) -> None:
    """Check that FBGEMM works on a rank's device, with a first operation. TorchRec must be installed.

    Its wheels have code only for some GPUs: as of FBGEMM 1.6 for compute capability 8.x, 9.0 and 10.0, and so not for a
    T4, a V100, or an RTX 20 or 50.

    Raises:
        ImportError: FBGEMM is built for CPUs alone.
        RuntimeError: FBGEMM has no code for this GPU.
    """
    import torch

    if device.type != "cuda":
        return
    try:
        torch.ops.fbgemm.asynchronous_complete_cumsum(torch.ones(2, dtype=torch.int32, device=device))
        torch.cuda.synchronize(device)
    except NotImplementedError as error:
        raise ImportError(
            "the FBGEMM that is installed works on CPUs alone, and this rank has a GPU: pip uninstall fbgemm-gpu-cpu "
            f"&& pip install --no-deps {' '.join(pair_for_this_torch())}"
        ) from error
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability(device)
        raise RuntimeError(
            f"FBGEMM, by which TorchRec looks up rows, does not work on this GPU, {torch.cuda.get_device_name(device)} "
            f"of compute capability {major}.{minor}: {str(error).splitlines()[0]}. Its wheels have code only for some "
            "GPUs, in release 1.6 for 8.x, 9.0 and 10.0. Use replicate(model, optimizer), which needs no FBGEMM"
        ) from error


def has_grid_shard() -> bool:
    """Return whether TorchRec has the strategy grid_shard. TorchRec 1.0, for torch 2.5, does not. TorchRec must be
    installed.
    """
    return importlib.util.find_spec("torchrec.distributed.sharding.grid_sharding") is not None


@functools.cache
def lacks_sequences() -> bool:
    """Return whether FBGEMM on CPUs cannot return single rows. This is tested with a look-up of two ids. FBGEMM 1.0 and
    1.1, for torch 2.5 and 2.6, return sums of rows; 1.2, for torch 2.7, raises an exception. TorchRec must be
    installed.
    """
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = [(1, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    with torch.random.fork_rng(devices=[]):
        look_up = SplitTableBatchedEmbeddingBagsCodegen(
            tables, pooling_mode=PoolingMode.NONE, device=torch.device("cpu")
        )
    try:
        return len(look_up(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]))) != 2
    except RuntimeError:  # an operator that was not built for CPUs
        return True


@contextlib.contextmanager
def _without_warnings_of_fbgemm() -> Iterator[None]:
    """Suppress FBGEMM's warnings at import, and the handler that it adds to the root logger.

    FBGEMM 1.6 does not find itself in its own list of releases, and warns of that for each of its libraries. `check`
    has compared the releases before.
    """
    root = logging.getLogger()
    before = list(root.handlers)

    def others(record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING or Path(record.pathname).parent.name != "fbgemm_gpu"

    root.addFilter(others)
    try:
        yield
    finally:
        root.removeFilter(others)
        for handler in set(root.handlers) - set(before):
            root.removeHandler(handler)


def pair_for_this_torch() -> tuple[str, str]:
    """Return the requirements of TorchRec and FBGEMM, the latter for CUDA if there is a GPU.

    Raises:
        ImportError: No release fits this torch.
    """
    import torch

    versions = matching(torch.__version__)
    build = "fbgemm-gpu" if torch.version.cuda and torch.cuda.is_available() else "fbgemm-gpu-cpu"
    return f"torchrec=={versions['torchrec']}", f"{build}=={versions[build]}"


def matching(torch_version: str) -> dict[str, str]:
    """Return the versions of torchrec, fbgemm-gpu and fbgemm-gpu-cpu for a torch, from releases.csv.

    Raises:
        ImportError: No release fits this torch.
    """
    release = tuple(int(part) for part in torch_version.split(".")[:2])
    table = releases()
    if release in table:
        return table[release]
    first, last = (".".join(map(str, edge(table))) for edge in (min, max))
    if release < min(table):
        raise ImportError(f"torch {torch_version} is older than {first}, the first that nbdist works with")
    raise ImportError(
        f"this version of nbdist knows a TorchRec for torch up to {last}, got torch {torch_version}: install torch "
        f"{last}, or a newer nbdist"
    )


def releases() -> dict[tuple[int, ...], dict[str, str]]:
    """Return the releases that belong together, by the release of torch.

    Source: "FBGEMM Releases Compatibility" in its documentation, https://docs.pytorch.org/FBGEMM; and the releases on
    PyPI.
    """
    with (Path(__file__).parent / "releases.csv").open(newline="") as file:
        return {tuple(int(part) for part in row.pop("torch").split(".")): row for row in csv.DictReader(file)}


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(*pair_for_this_torch())
