"""Packages in people's environments stay: installing nbdist replaces none, by pip's plan, without an installation."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nox.project
import pytest
import yaml

ROOT = Path(__file__).parent.parent


@functools.cache
def script(path: str) -> ModuleType:
    """Import a script of the repository, such as noxfile.py, which looks for interpreters when it is imported."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FLOORS = re.compile(r"([A-Za-z0-9_.-]+)(?:\[.*?\])?>=([0-9.]+)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of nbdist, built once for all plans."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [found] = folder.iterdir()
    return found


def would_install(
    wheel: Path, name: str, extras: str, keep: bool, folder: Path
) -> tuple[dict[str, str], dict[str, str]]:
    """The packages that pip would install, and those present: an environment of names and versions without files."""
    about = script("noxfile.py").ENVIRONMENTS[name]
    python = script("noxfile.py").interpreter(about["python"])
    if not Path(python).is_absolute():
        pytest.skip(f"no Python {about['python']} here")
    subprocess.run([python, "-m", "venv", "--without-pip", folder / "there"], check=True)
    [packages] = (folder / "there").glob("lib/python3*/site-packages")
    there = dict(pin.split("==") for pin in about["pins"].split())
    for package, version in there.items():
        info = packages / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
    (folder / "there.txt").write_text("".join(f"{package}=={version}\n" for package, version in there.items()))
    pip = [sys.executable, "-m", "pip", "--python", folder / "there/bin/python", "install", "--dry-run", "--quiet"]
    constraints = ["-c", folder / "there.txt"] if keep else []
    command = [*pip, "--report", "-", *constraints, f"{wheel}[{extras}]"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {item["name"].lower().replace("_", "-"): item["version"] for item in found}, there


@pytest.mark.long("installation plans")
@pytest.mark.parametrize("name", ["colab", "kaggle", "sagemaker"])
def test_installing_replaces_no_package(wheel: Path, name: str, tmp_path: Path) -> None:
    new, there = would_install(wheel, name, "fastai,notebook,recsys", False, tmp_path)
    assert "nbdist" in new and not set(new) & set(there)


@pytest.mark.long("installation plans")
@pytest.mark.parametrize("name", ["colab", "kaggle", "sagemaker"])
def test_extras_install_under_constraints(wheel: Path, name: str, tmp_path: Path) -> None:
    """The newest of what these bring along wants newer packages; older ones of it fit."""
    new, there = would_install(wheel, name, "torchrec,ray", True, tmp_path)
    assert {package: version for package, version in new.items() if package in there} == {}


def test_floors_are_what_the_oldest_environment_has() -> None:
    """No floor of the launcher's, fastai's and notebooks' requirements is above or below what is tested."""
    project = nox.project.load_toml(ROOT / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["fastai"], *extras["notebook"], *extras["recsys"]]
    pins = dict(pin.split("==") for pin in nox.project.load_toml(ROOT / "environments.toml")["oldest"]["pins"].split())
    for requirement in wanted:
        found = FLOORS.match(requirement)
        assert found is not None, requirement
        package, floor = found.groups()
        assert re.fullmatch(rf"{re.escape(floor)}(\.0)*", pins[package]), (requirement, pins[package])


@pytest.mark.long("installation plans")
def test_uv_uses_the_indexes_of_pip(tmp_path: Path) -> None:
    """The variables hold over the files, and the section `install` over `global`, as in pip."""
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://one\nfind-links = /wheels\n    /more\n[install]\nindex-url = https://two\n"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environ |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "HOME": str(tmp_path)}
    command = [sys.executable, ROOT / "requirements" / "places.py"]

    def said(**variables: str) -> list[str]:
        environment = {**environ, **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    assert {"--index-url=https://two", "--find-links=/wheels", "--find-links=/more"} <= set(said())
    assert "--index-url=https://one" not in said() and "--no-index" not in said()
    assert {"--extra-index-url=https://cpu", "--no-index"} <= set(
        said(PIP_EXTRA_INDEX_URL="https://cpu", PIP_NO_INDEX="1")
    )


def run_step(start: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a step of the release workflow, which comes before the build, in a folder, for the tag v0.1.0."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = workflow["jobs"]["build"]["steps"]
    names = [step.get("name") or step.get("run") or step["uses"] for step in steps]
    [number] = [number for number, name in enumerate(names) if name.startswith(start)]
    assert number < names.index("python -m build")
    variables = {
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_REPOSITORY": "someone/nbdist",
        "GITHUB_REPOSITORY_OWNER": "someone",
        "GITHUB_REF_NAME": "v0.1.0",
    }
    command = ["bash", "-euc", steps[number]["run"]]
    return subprocess.run(command, cwd=folder, env=os.environ | variables, capture_output=True, text=True)


@pytest.mark.parametrize("present", ["", '\n[project.urls]\nSource = "https://github.com/other/name"\n'])
def test_release_links_to_the_repository_that_builds_it(present: str, tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text + present)
    links = "[limits](docs/limits.md#gpus), [license](LICENSE)\n"
    links += "![two\nlines](notebooks/01_a.png), [there](https://example.org/a.png)"
    (tmp_path / "README.md").write_text(f"{(ROOT / 'README.md').read_text()}\n{links}\n")
    done = run_step("The package links to this repository", tmp_path)
    assert done.returncode == 0, done.stderr
    about = nox.project.load_toml(tmp_path / "pyproject.toml")
    address = "https://github.com/someone/nbdist"
    assert about["project"].pop("urls") == {
        "Homepage": address,
        "Source": address,
        "Documentation": "https://someone.github.io/nbdist/",
        "Changelog": f"{address}/blob/v0.1.0/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    before = nox.project.load_toml(ROOT / "pyproject.toml")
    before["project"].pop("urls", None)
    assert about == before
    assert script("notebooks/badges.py").repository(tmp_path / "pyproject.toml") == "someone/nbdist"
    readme = (tmp_path / "README.md").read_text()
    assert f"[limits]({address}/blob/v0.1.0/docs/limits.md#gpus), [license]({address}/blob/v0.1.0/LICENSE)" in readme
    assert f"![two\nlines]({address}/raw/v0.1.0/notebooks/01_a.png), [there](https://example.org/a.png)" in readme
    addresses = re.findall(r"\]\((.*?)\)", readme)
    assert len(addresses) > 10 and all(re.match("https?://|#", one) for one in addresses)


def test_source_distribution_has_what_the_tests_read() -> None:
    """The unpacked source distribution passes `make quick`. The build adds its own files, such as the license."""
    included = nox.project.load_toml(ROOT / "pyproject.toml")["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    names = {name.split("/")[1] for name in included} | {"README.md", "LICENSE", "pyproject.toml"}
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")]
    read = {name.split("/")[0] for text in texts for name in re.findall(r'\bROOT / f?"([^"]+)', text)}
    assert {name for name in read if (ROOT / name).exists()} <= names | {"build"}


@pytest.mark.parametrize(
    ("version", "heading", "status"),
    [
        ("0.1.0", "## [0.1.0] - 2026-12-01", 0),
        ("0.1.0", "## [0.1.0] - unreleased", 1),
        ("0.2.0", "## [0.2.0] - 2026-12-01", 1),
    ],
)
def test_release_needs_its_version_and_a_date(version: str, heading: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "nbdist"\nversion = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    done = run_step("The tag is the version", tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
