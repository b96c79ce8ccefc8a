"""cloudpickle's own test suite, run over the pickler here: `python tests/capture/cloudpickle_adapter.py FOLDER`.

FOLDER holds the unpacked source distribution of the release that the suite is taken from (`make cloudpickle` fetches
it). Inside the suite's processes `cloudpickle.dumps` and its like are this file's; reading is plain
`pickle.loads`, as the suite has it.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from nbdist.capture.depth import with_large_stack
from nbdist.capture.pickler import Pickler
from nbdist.capture.reading import Unreadable, read

#: Tests that cloudpickle passes and this pickler does not, each with the reason.
BY_DESIGN = {
    **dict.fromkeys(
        [
            "test_closure_interacting_with_a_global_variable",
            "test_interactive_remote_function_calls_no_side_effect",
            "test_interactively_defined_global_variable",
        ],
        "functions of one namespace share it where they arrive: a notebook's functions see one another's globals",
    ),
    **dict.fromkeys(
        [
            "test_deterministic_dynamic_class_attr_ordering_for_chained_pickling",
            "test_deterministic_str_interning_for_chained_dynamic_class_pickling",
            "test_dynamic_class_determinist_subworker_tuple_memoization",
        ],
        "pickles of equal objects need not be the same bytes: they are never compared",
    ),
    **dict.fromkeys(
        ["test_import", "test_multiprocess"],
        "functions of a module that can be imported have the module's own globals where they arrive",
    ),
    "test_out_of_band_buffers": "buffers go beside the pickle by another way, which tests/wire/test_parcel.py tests",
    "test_importing_multiprocessing_does_not_impact_whichmodule": "fails with cloudpickle itself: a name in NumPy",
}


def loads_packed(pickled: bytes) -> Any:
    try:
        return read(memoryview(pickled), [], originals=[], keep=lambda key, namespace, name: True)
    except Unreadable as exc:  # which a call turns into a CaptureError
        raise exc.__cause__ or exc from None


class Packed:
    """Is pickled as what reads the pickle that it holds."""

    def __init__(self, pickled: bytes) -> None:
        self.pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return loads_packed, (self.pickled,)


def dumps(obj: Any, protocol: int | None = None, buffer_callback: Any = None) -> bytes:
    def write() -> bytes:
        file = io.BytesIO()
        Pickler(file, in_band=True).dump(obj)
        return file.getvalue()

    try:
        pickled = with_large_stack(write)
    except RecursionError as exc:  # which a call turns into a CaptureError
        raise pickle.PicklingError("too deep: excessively deep recursion required.") from exc
    return pickle.dumps(Packed(pickled), protocol=protocol or pickle.HIGHEST_PROTOCOL)


def dump(obj: Any, file: Any, protocol: int | None = None, buffer_callback: Any = None) -> None:
    file.write(dumps(obj, protocol))


def install() -> None:
    """Put this pickler in the place of cloudpickle's functions, in a process of the suite."""
    cloudpickle.dumps = cloudpickle.cloudpickle.dumps = dumps
    cloudpickle.dump = cloudpickle.cloudpickle.dump = dump


def pytest_collection_modifyitems(items: list[Any]) -> None:
    import pytest

    # There is one protocol here: the suite's second run, with another, is the same again.
    items[:] = [item for item in items if "Protocol2" not in item.nodeid]
    for item in items:
        reason = BY_DESIGN.get(item.originalname)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def main(folder: Path) -> int:
    here = Path(__file__).resolve()
    # The suite's own processes have only its folders on their path, and find this there.
    (folder / "tests" / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(here.parent)!r})\n"
        "import cloudpickle_adapter\ncloudpickle_adapter.install()\n"
    )
    packages = folder / "tests" / "cloudpickle_testpkg"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "tests"), str(folder), str(packages)])}
    command = [sys.executable, "-m", "pytest", "-p", "cloudpickle_adapter", "-c", os.devnull, "--rootdir", str(folder)]
    return subprocess.call([*command, "-q", "-rfE", "tests/cloudpickle_test.py", *sys.argv[2:]], cwd=folder, env=env)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
