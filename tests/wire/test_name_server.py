"""Ranks meet without a name server: it may be slow, drop questions, or be away."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cells import cells

#: A script in namespaces of its own, with a name server that counts questions and never answers. Its ranks join like
#: ranks of several machines. Exit code 77: this machine does not allow namespaces.
SCRIPT = cells("wire/cells/name_server.py")["ranks with a name server"]


@pytest.mark.long("interpreters of their own")
@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux' own")
def test_no_rank_asks_a_name_server(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parent.parent.parent)
    ran = subprocess.run([sys.executable, str(script)], env={"PYTHONPATH": root}, capture_output=True, text=True)
    if ran.returncode == 77:
        pytest.skip("this machine lets nobody make namespaces")
    assert ran.returncode == 0, ran.stderr
    joined, asked = ran.stdout.splitlines()
    assert joined == "True 0", ran.stdout + ran.stderr
    assert asked == "True"
