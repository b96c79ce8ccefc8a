"""The places where pip looks for packages, as options of uv, which does not read pip's settings: one line for a shell.

python requirements/places.py    with the Python whose pip it is
"""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys

#: pip's settings by their names, and what uv calls them.
OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
    "no-index": "--no-index",
}


def options(listed: str) -> list[str]:
    """The options that say what `pip config list` does, such as `global.index-url='https://...'`."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}  # the later hold
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in sections and option in OPTIONS:
            sections[section][option] = ast.literal_eval(value)
    found = []
    for option, value in {**sections["global"], **sections["install"], **sections[":env:"]}.items():
        if option == "no-index":
            found += [OPTIONS[option]] if value.lower() in ("1", "true", "yes", "on") else []
        else:
            found += [f"{OPTIONS[option]}={place}" for place in value.split()]
    return found


if __name__ == "__main__":
    command = [sys.executable, "-m", "pip", "config", "list"]
    print(shlex.join(options(subprocess.run(command, capture_output=True, text=True, check=True).stdout)))
