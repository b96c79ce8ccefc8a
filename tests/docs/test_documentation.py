"""Every code block of the README and of docs/ runs, in the order of its page, in a real kernel.

A `python` block is a cell. It must not raise, unless a `pytb` block follows it, which shows the end of the error. A
`text` block after it shows what the cell prints. In both, `...` stands for anything. A comment
`<!--- invisible-code-block: python` holds a cell that the reader need not see. Any other block needs a comment
`<!--- skip: next if(True, reason="...")` before it.
"""

from __future__ import annotations

import ast
import doctest
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import SkipTest

import draw
import llms
import messages
import pytest
from conftest import Kernel, Result
from sybil import Example
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

import nbdist
from nbdist.recsys.triton import serving

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if not page.name[0].isdigit())]
WITH_BLOCKS = [page for page in PAGES if "```" in page.read_text(encoding="utf-8")]
LONG = pytest.mark.long("pages of the documentation")
NEEDS_TRITON = {"how-to/triton.md"}

#: Messages of Python, torch and IPython that troubleshooting.md explains.
NOT_OURS = {
    "RuntimeError: … Timed out waiting … ",
    "Connection closed by peer",
    "ValueError: trying to initialize the default process group twice!",
    "Connection reset",
    "KeyboardInterrupt",
    "CancelledError",
    "ModuleNotFoundError",
    "ImportError",
    "NameError: name '…' is not defined",
    "Cell magic ",
    " not found",
    "%%ddp",
}

#: What is not there when the notebook begins, or was left by the page before it.
FRESH = """
import gc, nbdist
for _value in list(globals().values()):
    if isinstance(_value, nbdist.Session):
        _value.close()
nbdist.use("local")
%unload_ext nbdist
%reset -f
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS if DOCS in page.parents else ROOT))


#: Lines that a call shows on a busy machine.
SLOW = re.compile(r"^nbdist: (rank \d+ waited|no ranks after|not begun after) .*\n", re.MULTILINE)


class Page:
    """A page's blocks, run in a kernel."""

    def __init__(self, path: Path, kernel: Kernel) -> None:
        self._kernel = kernel
        self._result = Result()
        blocks = {"python": self._run, "text": self._printed, "pytb": self._raised}
        fences = FencedCodeBlockLexer(".+", mapping={"language": "language", "source": "source"})
        bare = Document(path.read_text(encoding="utf-8"), str(path))
        others = {region.lexemes["language"] for region in fences(bare)} - set(blocks)
        parsers = [CodeBlockParser(language, evaluate) for language, evaluate in blocks.items()]
        parsers += [CodeBlockParser(language, self._unknown) for language in sorted(others)]
        self.document = Document.parse(str(path), SkipParser(), *parsers)

    def evaluate(self) -> None:
        for example in self.document:
            try:
                example.evaluate()
            except SkipTest as reason:
                assert str(reason).strip(), "why a block is not run has to be said"
        self._nothing_raised()

    def _run(self, example: Example) -> None:
        self._nothing_raised()
        self._result = self._kernel.run(str(example.parsed))

    def _nothing_raised(self) -> None:
        assert self._result.error is None, self._result.plain_traceback

    def _printed(self, example: Example) -> None:
        self._nothing_raised()
        text = re.sub(r"\x1b\[[0-9;]*m", "", self._result.text)
        # A kernel sends its two streams in no fixed order: warnings may come after what the page shows first.
        warnings = "".join(one["text"] for one in self._result.outputs if one.get("name") == "stderr")
        check(example.parsed, text, warnings + text.replace(warnings, "", 1), SLOW.sub("", text))

    def _raised(self, example: Example) -> None:
        result, self._result = self._result, Result()
        assert result.error is not None, f"the cell does not raise; it printed: {result.text}"
        check(example.parsed, f"{result.error}: {result.message}\n")

    def _unknown(self, example: Example) -> None:
        raise AssertionError(f"a block of {example.region.lexemes['arguments']!r} is not run: say why")


def check(wanted: str, *got: str) -> None:
    """Raise unless one of `got` is what a block shows."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    checker = doctest.OutputChecker()
    seen = any(checker.check_output(wanted, one, flags) for one in got)
    assert seen, f"the page shows\n{wanted}\nbut the cell\n{got[0]}"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start one kernel for all pages, which begin with an empty notebook, so that libraries are imported once."""
    folder = tmp_path_factory.mktemp("pages")
    # No data set is downloaded: there is nothing at that port.
    env = {"FASTAI_HOME": str(folder / "fastai"), "https_proxy": "http://127.0.0.1:9", "RAY_USAGE_STATS_ENABLED": "0"}
    kernel = Kernel(folder, env)
    try:
        yield kernel
    finally:
        kernel.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [page if page.name == "README.md" else pytest.param(page, marks=LONG) for page in WITH_BLOCKS], ids=name_of
)
def test_every_block_runs(path: Path, kernel: Kernel) -> None:
    if name_of(path) in NEEDS_TRITON and not serving.exists_for_this_machine():
        pytest.skip("no Triton server for this machine")
    kernel.ok(FRESH)
    Page(path, kernel).evaluate()


def test_a_page_shows_what_happens(kernel: Kernel, tmp_path: Path) -> None:
    prints = "```python\nx = 6\nprint(x * 7)\n```\n\n```text\n4...\n```\n"
    raises = "```python\n1 / 0\n```\n\n```pytb\nZeroDivisionError: ...\n```\n"
    hidden = "<!--- invisible-code-block: python\nseen = 1\n--->\n```python\nprint(seen)\n```\n"
    skipped = '<!--- skip: next if(True, reason="installs") -->\n```sh\nrm -rf /\n```\n'
    bad = [
        "```python\n1 / 0\n```\n",
        "```python\nprint(1)\n```\n\n```text\n2\n```\n",
        "```python\n1 / 0\n```\n\n```pytb\nValueError: ...\n```\n",
        "```python\n1\n```\n\n```pytb\nValueError: ...\n```\n",
        "```sh\nls\n```\n",
    ]
    page = tmp_path / "page.md"
    for text in (prints, raises, hidden, skipped, raises + prints + hidden + skipped):
        page.write_text(text)
        Page(page, kernel).evaluate()
    for text in bad:
        page.write_text(text)
        with pytest.raises(AssertionError):
            Page(page, kernel).evaluate()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_changelog_is_short() -> None:
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """Links between pages are checked where the site is built (`make docs`), images and what GitHub shows are not."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target and not re.search(r"notebooks/\d\d|^\d\d", target.removeprefix("../")):
            assert (page.parent / target).exists(), f"there is no {target}"


def test_development_names_the_files_that_there_are() -> None:
    table = re.findall(
        r"^\| `(nbdist/.*?)` \|(.*)", (DOCS / "development.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(table) > 8
    for folder, row in table:
        named = set(re.findall(r"`(\w+\.py)`", row))
        there = {file.name for file in (ROOT / folder).glob("*.py")} - {"__init__.py"}
        assert not (named - there - {"__init__.py"}), folder
        assert folder == "nbdist/recsys/" or not there - named, folder


def test_the_tables_of_messages_are_those_of_the_protocol() -> None:
    command = "`python tests/docs/messages.py` writes the page"
    assert messages.PAGE.read_text(encoding="utf-8") == messages.page(), command


def test_messages_of_troubleshooting_are_in_the_code() -> None:
    """The longest part without names and numbers of each message on the page is in a text of nbdist's."""
    texts = "\n".join(
        node.value
        for file in (ROOT / "nbdist").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    rows = re.findall(r"^\| (`.*?) \| ", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 60
    for message in set(quoted) - NOT_OURS:
        text = re.sub(r"^\w*(Error|Warning|Died|Timeout): |^nbdist: ", "", message)
        names = r"\b(?:GPUs|all_reduce|adam|nranks|node|rank)\b|\w+(?= must be )"
        parts = re.split(rf"…|'[^']*'|\b[A-Z]+\b|\d[\d.,]*|{names}", text)
        longest = max((part.strip(" :;,().") for part in parts), key=len)
        assert longest in texts, message


def test_the_reference_has_every_public_name() -> None:
    text = (DOCS / "reference" / "nbdist.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^::: nbdist\.(\w+)$", text, re.MULTILINE)) == set(nbdist.__all__)
    (members,) = re.findall(r"^::: nbdist.Session\n    options:\n      members: \[(.*)\]$", text, re.MULTILINE)
    public = {name for name in dir(nbdist.Session) if not name.startswith("_")}
    assert set(members.split(", ")) == public


def test_every_page_begins_with_what_it_is_for() -> None:
    pages = [page for page in PAGES[1:] if name_of(page) != "index.md" and page.parent.name != "reference"]
    for page in pages:
        text = re.sub(r"^---\n.*?\n---\n", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert re.match(r"\s*# .*\n\nAfter this page you ", text), name_of(page)


def test_a_recipe_needs_no_other_recipe(tmp_path: Path) -> None:
    """Each recipe of the cookbook can be copied with the imports at its top."""
    text = (DOCS / "cookbook.md").read_text(encoding="utf-8")
    imports, *recipes = re.split(r"^### \d+\. ", text, flags=re.MULTILINE)
    assert len(recipes) == 20
    for number, recipe in enumerate(recipes, 1):
        code = [block for part in (imports, recipe) for block in re.findall(r"```python\n(.*?)```", part, re.DOTALL)]
        (tmp_path / f"recipe_{number}.py").write_text("\n".join(code), encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F821", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_glossary_is_short() -> None:
    text = (DOCS / "development.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z ]+) \|", text.partition("## Glossary")[2].partition("\n## ")[0], re.MULTILINE)
    assert 25 < len(rows) - 1 <= 40 and len(set(rows)) == len(rows)


def test_llms_txt_has_every_page() -> None:
    index = llms.index()
    for page in PAGES[1:]:
        assert f"]({name_of(page).removesuffix('.md')}.html)" in index, name_of(page)
    assert "```" not in index and len(llms.full()) > 100_000


def test_the_reading_test_draws_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    draw.main(1)
    first = capsys.readouterr().out
    draw.main(1)
    assert capsys.readouterr().out == first
    for kind, count in zip(("docstring", "message", "paragraph"), draw.COUNTS, strict=True):
        assert len(re.findall(rf"^\[{kind} \d+\]", first, re.MULTILINE)) == count


def test_no_rule_is_written_twice() -> None:
    """A line of AGENTS.md is not in CONTRIBUTING.md."""
    texts = [(ROOT / name).read_text(encoding="utf-8").splitlines() for name in ("AGENTS.md", "CONTRIBUTING.md")]
    agents, contributing = ({line for line in text if len(line) > 40} for text in texts)
    assert not agents & contributing


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert named == {name_of(page) for page in PAGES[1:]} | notebooks
