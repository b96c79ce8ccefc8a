"""TorchRec, FBGEMM and torch have to be of one release; a wrong pair fails late and with a riddle, so look first."""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata

DISTRIBUTIONS = ("fbgemm-gpu", "fbgemm-gpu-cpu")
"""Both hold the module `fbgemm_gpu`: built for CUDA, and for CPUs alone."""


def check_torchrec() -> None:
    """Make sure that `import torchrec` can work.

    Raises:
        ImportError: torchrec or fbgemm is missing, of another release than torch, or cannot be loaded. The message
            names the versions to install.
    """
    import torch

    release = matching(torch.__version__)
    build = "fbgemm-gpu" if torch.version.cuda and torch.cuda.is_available() else "fbgemm-gpu-cpu"
    advice = (
        f"For torch {torch.__version__.partition('+')[0]}, install the pair torchrec=={release} and {build}=={release}:"
        f'\n    pip install "nbdist[torchrec]" && pip install --no-deps torchrec=={release} {build}=={release}'
    )
    found = {name: _version(name) for name in ("torchrec", *DISTRIBUTIONS)}
    if importlib.util.find_spec("torchrec") is None:
        raise ImportError(f"TorchRec is not installed. {advice}")
    if importlib.util.find_spec("fbgemm_gpu") is None:
        raise ImportError(f"TorchRec needs FBGEMM, which is not installed. {advice}")
    if all(found[name] for name in DISTRIBUTIONS):
        raise ImportError(
            f"fbgemm-gpu {found['fbgemm-gpu']} and fbgemm-gpu-cpu {found['fbgemm-gpu-cpu']} are both installed and "
            f"overwrite each other's files: pip uninstall fbgemm-gpu fbgemm-gpu-cpu. {advice}"
        )
    for name, version in found.items():
        # A build of one's own or a nightly has another name, and no version here: importing it is the test.
        if version is not None and version.split(".")[:2] != release.split(".")[:2]:
            raise ImportError(f"{name} {version} is installed, which belongs to another release of torch. {advice}")
    try:
        importlib.import_module("fbgemm_gpu")
        importlib.import_module("torchrec")
    except ModuleNotFoundError as error:
        raise ImportError(f"TorchRec needs the module {error.name}, which is not installed. {advice}") from error
    except Exception as error:  # OSError, AttributeError, RuntimeError: whatever a library of the wrong build runs into
        raise ImportError(f"TorchRec or FBGEMM cannot be loaded: {type(error).__name__}: {error}. {advice}") from error


def matching(torch_version: str) -> str:
    """The release of torchrec and fbgemm for a torch: theirs count from 1.0 at torch 2.5, one minor version each.

    Source: "TorchRec Compatibility" in the documentation of FBGEMM, https://docs.pytorch.org/FBGEMM.
    """
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    if (major, minor) < (2, 5):
        raise ImportError(f"torch {torch_version} is older than 2.5, the first that nbdist works with")
    return f"1.{minor - 5}.0"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
