"""The rooms of the package: which may import which, and no circle of files anywhere."""

from __future__ import annotations

import ast
import dataclasses
import functools
import graphlib
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import nbdist

PACKAGE = Path(nbdist.__file__).parent
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}

#: The most lines of a function and of a class, without docstrings.
LINES: dict[type[ast.AST], int] = {ast.FunctionDef: 60, ast.AsyncFunctionDef: 60, ast.ClassDef: 250}

#: Everybody may ask what this process is, and raise what users meet.
COMMON = {"", "checks", "errors", "deaths", "notebook", "system", "devices"}
#: What each room may import in addition to these and itself.
MAY: dict[str, set[str]] = {
    "wire": set(),
    "shm": set(),
    "numerics": set(),
    "replay": set(),
    "capture": {"wire"},
    "rank": {"wire", "capture", "fastai", "numerics", "replay"},
    "server": {"wire", "rank"},
    "engines": {"wire", "server"},
    "kernel": {"wire", "capture", "fastai", "rank", "engines", "replay"},
    "keeper": {"wire", "capture", "engines", "kernel"},
    "__main__": {"kernel"},
    "integrations.pytest": {"kernel"},
    "recsys": {"recsys.recommenders"},
    "recsys.io": {"recsys.ranks"},
    "recsys.loader": {"recsys.io", "recsys.ranks"},
    "recsys.etl": {"recsys.io", "recsys.ranks"},
    "recsys.metrics": {"recsys.loader", "recsys.ranks"},
    "recsys.raw_ids": set(),
    "recsys.models": {"recsys.loader", "recsys.ranks", "recsys.raw_ids"},
    "recsys.retrieval": {"recsys.io", "recsys.loader", "recsys.ranks"},
    "recsys.parallel": {"shm", "recsys.raw_ids"},
    "recsys.sharding": {
        "shm",
        "recsys.loader",
        "recsys.models",
        "recsys.parallel",
        "recsys.raw_ids",
        "recsys.versions",
    },
    "recsys.training": {
        *("numerics", "replay", "recsys.io", "recsys.loader", "recsys.metrics", "recsys.parallel", "recsys.ranks")
    },
    "fastai": {"shm", "replay", "recsys.loader", "recsys.parallel"},
    "recsys.recommenders": {
        *("recsys.etl", "recsys.io", "recsys.loader", "recsys.metrics", "recsys.ranks", "recsys.retrieval"),
        "recsys.triton",
    },
    "recsys.days": {
        *("recsys.etl", "recsys.io", "recsys.loader", "recsys.metrics", "recsys.parallel", "recsys.ranks"),
        "recsys.training",
    },
    "recsys.triton": {"recsys.etl", "recsys.io", "recsys.loader", "recsys.ranks", "recsys.raw_ids"},
}
#: What the models that Triton serves are made of; they are copied to it, and find nothing of this package there.
SERVED = "recsys.triton.served"
ON_A_SERVER = {"numpy", "onnxruntime", "triton_python_backend_utils", *sys.stdlib_module_names}
#: `nbdist` itself names what is public, wherever it is.
ROOT = "__init__"


def room(module: str) -> str:
    """The room that a module is in; its own name where it is in none."""
    top, _, rest = module.partition(".")
    return ".".join([top, *rest.split(".")[:1]]) if top in ("integrations", "recsys") and rest else top


@functools.cache
def imports(module: str) -> list[str]:
    """The modules of this package that a module imports, anywhere in its text."""
    found: list[str] = []
    path = FILES[module]
    package = ["nbdist", *module.split(".")] if path.name == "__init__.py" else ["nbdist", *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "nbdist":
                inner = name.removeprefix("nbdist").lstrip(".")
                found.append(inner if inner in FILES else inner.rpartition(".")[0])
    return found


@pytest.mark.parametrize("module", sorted(FILES.keys() - {ROOT}))
def test_imports_point_one_way(module: str) -> None:
    allowed = {room(module), *COMMON, *MAY.get(room(module), ())}
    assert not {imported for imported in imports(module) if room(imported) not in allowed}


def test_no_circle_of_rooms() -> None:
    graphlib.TopologicalSorter(MAY).prepare()


@pytest.mark.parametrize("module", [module for module in FILES if module.startswith(SERVED)])
def test_served_code_imports_nothing_of_nbdist(module: str) -> None:
    nodes = list(ast.walk(ast.parse(FILES[module].read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= ON_A_SERVER


@pytest.mark.parametrize("common", sorted(COMMON - {""}))
def test_common_modules_import_no_room(common: str) -> None:
    assert {room(imported) for imported in imports(common)} <= COMMON


def test_no_circle_of_files() -> None:
    graph = {module: set(imports(module)) - {module} for module in FILES if module != ROOT}
    graphlib.TopologicalSorter(graph).prepare()  # it says which, where there is one


@pytest.mark.started
@pytest.mark.parametrize(
    "line",
    ["import nbdist, nbdist.fastai", "import nbdist.integrations.pytest", "from nbdist import NbdistError, RayOptions"],
)
def test_an_import_is_light(line: str) -> None:
    loaded = "print(*{name.partition('.')[0] for name in sys.modules} & {'torch', 'fastai', 'IPython', 'ray'})"
    done = subprocess.run([sys.executable, "-c", f"import sys; {line}; {loaded}"], capture_output=True, text=True)
    assert done.stdout.split() == [], done


@pytest.mark.started
def test_pytest_loads_next_to_nothing_of_it() -> None:
    code = "import sys, nbdist.integrations.pytest; print(*[name for name in sys.modules if name.startswith('nbdist')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"nbdist", "nbdist.integrations", "nbdist.integrations.pytest"}


def too_long(source: str) -> dict[str, int]:
    """The functions and classes with too many lines, docstrings not counted."""
    found = {}
    for node in definitions(ast.parse(source)):
        lines = _lines(node) - sum(_lines(inner.body[0]) for inner in definitions(node) if ast.get_docstring(inner))
        if lines > LINES[type(node)]:
            found[node.name] = lines
    return found


def definitions(tree: ast.AST) -> list[Any]:
    return [node for node in ast.walk(tree) if type(node) in LINES]


def _lines(node: Any) -> int:
    return int(node.end_lineno - node.lineno + 1)


def test_functions_and_classes_are_short() -> None:
    assert not {module: found for module, path in FILES.items() if (found := too_long(path.read_text()))}


def test_a_long_function_and_a_long_class_are_found() -> None:
    line, docstring = "    x = 1\n", '    """Text.\n' + "\n" * 99 + '    """\n'
    assert too_long(f"def f():\n{docstring}{line * 60}") == {"f": 61}
    assert too_long(f"def f():\n{docstring}{line * 59}") == {}
    assert too_long(f"class C:\n{docstring}{line * 250}") == {"C": 251}


def test_public_names() -> None:
    assert {name for name in dir(nbdist) if not name.startswith("_")} == {*nbdist.__all__, "fastai", "recsys"}
    fields = {field.name for field in dataclasses.fields(nbdist.RayOptions)}
    assert {name for name in dir(nbdist.RayOptions()) if not name.startswith("_")} == fields | {"engine"}
    for name in nbdist.__all__:
        assert getattr(nbdist, name).__module__.startswith("nbdist")
    with pytest.raises(AttributeError, match="no attribute 'in_dpp'"):
        nbdist.in_dpp  # noqa: B018


def test_completion_offers_what_packages_have() -> None:
    """The public names of a package, those that are imported later included, and its modules; nothing else."""
    names = [f"nbdist.{name}".removesuffix(".__init__") for name, path in FILES.items() if path.name == "__init__.py"]
    for package in map(importlib.import_module, names):
        if public := set(getattr(package, "__all__", ())):
            offered = {name for name in dir(package) if name.isidentifier() and not name.startswith("_")}
            assert public <= offered, package.__name__
            others = [name for name in offered - public if not importlib.util.find_spec(f"{package.__name__}.{name}")]
            assert not others, package.__name__


@pytest.mark.started
def test_importing_in_ddp_on_windows_says_what_to_do() -> None:
    code = "import sys; sys.platform = 'win32'\ntry: from nbdist import in_ddp\nfinally: print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "NotImplementedError" in done.stderr and "wsl --install" in done.stderr, done.stderr
    assert "'torch'" not in done.stdout and "nbdist.kernel" not in done.stdout
