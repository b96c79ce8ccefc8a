"""Write llms.txt, the list of pages for language models (https://llmstxt.org), and llms-full.txt, their text.

python tests/docs/llms.py FOLDER
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SUMMARY = (
    "Run a function of a Jupyter notebook on every GPU or on several CPU ranks with one line, and get its value back."
)
NOTES = """
- `in_ddp(2, fn, *args)` runs `fn` on 2 ranks under torch.distributed and returns the value of rank 0.
- The process group is set up. Do not call `init_process_group`, and write neither a script nor a `__main__` guard.
- Functions, classes and data of the notebook are found and sent. Star imports go into `imports="..."`.
- `Session(2)` keeps ranks: `run`, `run_all`, `submit`, `close`.
- Options of one call: `in_ddp.options(timeout=60)(2, fn)`.
- Make models, optimizers and data loaders inside the function.
""".strip()


def pages() -> list[tuple[str, list[str]]]:
    """Read the sections of the navigation in mkdocs.yml, and the files of each."""
    sections: list[tuple[str, list[str]]] = [("Start", [])]
    for line in (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines():
        if section := re.fullmatch(r"  - (.+):", line):
            sections.append((section[1], []))
        elif page := re.fullmatch(r"( +)- (\S+\.md)", line):
            sections[0 if len(page[1]) == 2 else -1][1].append(page[2])
    return sections


def described(file: str) -> tuple[str, str]:
    """Return the title of a page, and what its first paragraph says."""
    path = DOCS / file
    if not path.exists():  # a notebook whose page was not made
        return file.removesuffix(".md"), ""
    text = re.sub(r"^---\n.*?\n---\n", "", path.read_text(encoding="utf-8"), flags=re.S)
    title, _, rest = text.lstrip().partition("\n")
    first = next((part for part in re.split(r"\n\s*\n", rest) if re.match(r"\s*(?!```)[A-Z`*]", part)), "")
    sentence = re.split(r"(?<=[.:])\s", " ".join(first.split()))[0]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", sentence)
    return title.lstrip("# "), plain.removeprefix("After this page you can ").removesuffix(":")


def index() -> str:
    """Make llms.txt: the title, a summary, notes, and a list of links for each section of the site."""
    lines = ["# nbdist", "", f"> {SUMMARY}", "", NOTES]
    for section, files in pages():
        lines += ["", f"## {section}", ""]
        for file in files:
            title, text = described(file)
            lines.append(f"- [{title}]({file.removesuffix('.md')}.html)" + (f": {text}" if text else ""))
    return "\n".join([*lines, ""])


def full() -> str:
    """Join the Markdown of all pages, without comments."""
    files = [DOCS / file for _, some in pages() for file in some if (DOCS / file).exists()]
    texts = [f"<!-- {file.relative_to(DOCS)} -->\n" + file.read_text(encoding="utf-8") for file in files]
    return "\n".join(re.sub(r"<!--- .*?-->\n?", "", text, flags=re.S) for text in texts)


def main(folder: str) -> None:
    Path(folder, "llms.txt").write_text(index(), encoding="utf-8")
    Path(folder, "llms-full.txt").write_text(full(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
