"""Measurements, in rooms like `nbdist/`'s: `python -m benchmarks.<room>.<name>`, in the root of a clone."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # the fault table, the soak, kernels and clusters as the tests start them
