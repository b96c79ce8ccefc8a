"""Tests on imitated GPUs: `make gpu-imitated`. Elsewhere nothing of this folder is collected."""

from __future__ import annotations

import imitated

collect_ignore_glob = [] if imitated.present() else ["test_*.py"]
