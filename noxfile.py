"""`make matrix`: the environments of environments.toml, each built from its pins, and what is run in them.

Each session leaves `build/matrix/NAME.json`; the last one, `table`, shows them side by side.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import nox
import nox.project

ENVIRONMENTS: dict[str, dict[str, Any]] = nox.project.load_toml(Path(__file__).parent / "environments.toml")
SUITE = ENVIRONMENTS.pop("suite")
RESULTS = Path("build/matrix")
#: What the table says of each environment.
SHOWN = ("torch", "numpy", "ipython", "ipykernel", "ipywidgets", "psutil", "polars")

nox.options.sessions = [*ENVIRONMENTS, "table"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


def interpreter(version: str) -> str:
    """A Python of this version that can make environments: on PATH, or one of pyenv's; else its name, as missing."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))]
    for path in filter(None, found):  # pyenv's shims are there for versions that are not chosen, too, and fail
        if subprocess.run([str(path), "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
            return str(path)
    return f"python{version}"


def build(session: nox.Session, about: dict[str, Any]) -> None:
    """An environment with its pins and nbdist."""
    wanted = ["-e", ".[fastai,notebook,recsys]", *SUITE["packages"].split(), *about.get("packages", "").split()]
    if "constraints" in about:
        session.install("-c", about["constraints"], *wanted)
    elif "pins" in about:
        pins = RESULTS / f"{session.name}.txt"
        pins.write_text("\n".join(about["pins"].split()) + "\n")
        session.install("-c", str(pins), *wanted)
    else:
        session.install("--upgrade", *wanted)


def install_torchrec(session: nox.Session) -> bool:
    """Install the TorchRec and FBGEMM that go with this torch; whether there are such."""
    pair = str(session.run("python", "-m", "nbdist.recsys.versions", silent=True, success_codes=[0, 1])).split()
    if not pair or not pair[0].startswith("torchrec=="):
        return False
    torch = f"torch=={versions(session)['torch'].partition('+')[0]}"
    session.install(torch, "iopath", "pyre-extensions", "tensordict", "typing-inspect")  # as old as this torch needs
    session.install("--no-deps", *pair)  # their metadata ask for a CUDA build
    return True


def lay_over(session: nox.Session, about: dict[str, Any]) -> None:
    """An environment with its pins, and with links to all else of another one: there is no second torch."""
    if "pins" in about:
        session.install("--no-deps", *about["pins"].split())
    main = Path(about["over"]).resolve()
    [below] = main.glob("lib/python3*/site-packages")
    [above] = Path(session.virtualenv.location).resolve().glob("lib/python3*/site-packages")
    hidden = {name_of(one) for one in distributions(path=[str(above)])} | set(about.get("without", []))
    for one in distributions(path=[str(below)]):
        files = [] if name_of(one) in hidden else one.files or []
        for part in {Path(file).parts[0] for file in files} - {"..", "__pycache__"}:
            if (below / part).exists() and not (above / part).exists():
                (above / part).symlink_to(below / part)
    here = above.parents[2]
    for data in (*main.glob("share/jupyter/*"), *main.glob("etc/jupyter/*")):
        place = here / data.relative_to(main)
        if not place.exists():  # ipywidgets of the pins has brought a folder there
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(data)


def name_of(distribution: Distribution) -> str:
    return str(distribution.metadata["Name"]).lower().replace("_", "-").replace(".", "-")


def versions(session: nox.Session) -> dict[str, str]:
    code = (
        "import json, platform, importlib.metadata as m\n"
        f"names = {set(SHOWN)!r}\n"
        "found = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
        "print(json.dumps({'python': platform.python_version(), **{n: v for n, v in found.items() if n in names}}))"
    )
    return json.loads(str(session.run("python", "-c", code, silent=True)).splitlines()[-1])


def check(session: nox.Session, name: str) -> None:
    """The core suite, or what was asked for after `--`; notebook 01 at small size; and what shards by TorchRec.

    This comes last: the core has to do without TorchRec.
    """
    about = ENVIRONMENTS[name]
    begin, report = time.monotonic(), RESULTS / f"{name}.xml"
    RESULTS.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    (lay_over if "over" in about else build)(session, about)
    result: dict[str, Any] = {"what": about["what"], **versions(session), "notebook": "failed", "sharding": "–"}
    arguments = session.posargs or [*about.get("tests", SUITE["tests"]), *SUITE["arguments"]]
    environ = {"PYTHONPATH": str(Path(about["path"]).resolve())} if "path" in about else {}
    try:
        command = ["python", "-m", "pytest", "-p", "no:cacheprovider", f"--junit-xml={report}", *arguments]
        session.run(*command, env=environ)
        notebook = "notebooks/01_fastai_collab.ipynb"
        folder = f"--output={RESULTS / name}"
        session.run(
            "python", "notebooks/execute.py", notebook, folder, env={**environ, "NBDIST_SMALL": "1"}, silent=True
        )
        result["notebook"] = "runs"
        if "over" not in about and not session.posargs and install_torchrec(session):
            result["sharding"] = "failed"
            session.run("python", "-m", "pytest", "-p", "no:cacheprovider", *SUITE["sharding"])
            result["sharding"] = "passed"
    finally:  # a session that fails is in the table, too
        if report.exists():
            [suite] = ElementTree.parse(report).getroot().iter("testsuite")
            counts = {count: int(suite.get(count, "0")) for count in ("tests", "failures", "errors", "skipped")}
            failed = counts["failures"] + counts["errors"]
            result["passed"] = counts["tests"] - failed - counts["skipped"]
            result |= {"failed": failed, "skipped": counts["skipped"]}
        result["minutes"] = round((time.monotonic() - begin) / 60, 1)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1))


def use_imitated_gpus(session: nox.Session, about: dict[str, Any]) -> None:
    """Run tests/gpu, or what was asked for, in an environment whose torch is a CUDA build."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    build(session, about)
    session.install("nvidia-ml-py")  # reads what the imitated driver says
    tests = session.posargs[1:] or ["tests/gpu"]
    session.run("python", "tests/gpu/imitated", "-m", "pytest", "-q", "-p", "no:xdist", *tests)


def shard(session: nox.Session, about: dict[str, Any]) -> None:
    """Run the tests of sharding alone, or those that were asked for."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    build(session, about)
    if not install_torchrec(session):
        session.error("no TorchRec goes with this torch")
    session.run("python", "-m", "pytest", "-p", "no:cacheprovider", *(session.posargs[1:] or SUITE["sharding"]))


def add_session(name: str, about: dict[str, Any]) -> None:
    python = sys.executable if "over" in about else interpreter(about["python"])

    def run(session: nox.Session) -> None:
        if session.posargs[:1] == ["imitated"]:
            use_imitated_gpus(session, about)
        elif session.posargs[:1] == ["sharding"]:
            shard(session, about)
        else:
            check(session, name)

    run.__doc__ = about["what"]
    nox.session(run, name=name, python=python, venv_backend="uv|venv", reuse_venv="over" not in about)


for _name, _about in ENVIRONMENTS.items():
    add_session(_name, _about)


@nox.session(python=False)
def table(session: nox.Session) -> None:
    """Print what the latest run in each environment has found."""
    head = ["environment", "python", *SHOWN, "passed", "failed", "skipped", "notebook 01", "sharding", "minutes"]
    rows = [head, ["---"] * len(head)]
    for name, about in ENVIRONMENTS.items():
        file = RESULTS / f"{name}.json"
        if file.exists():
            found = json.loads(file.read_text())
            keys = ("python", *SHOWN, "passed", "failed", "skipped", "notebook", "sharding", "minutes")
            rows.append([name, *(str(found.get(key, "–")) for key in keys)])
        else:
            rows.append([name, about.get("python", ""), *("–" for _ in SHOWN), "not run", *("–" for _ in range(5))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
