"""Starts this interpreter with two imitated GPUs: `python tests/gpu/imitated -m pytest tests/gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    from imitated import environment

    with environment() as variables:
        sys.exit(subprocess.run([sys.executable, *sys.argv[1:]], env={**os.environ, **variables}).returncode)
