"""A real IPython kernel, driven from outside as a front end drives it, and ended with all that it started."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

from benchmarks import ROOT

#: Every process that descends from a kernel has this in its environment, also when it has left the kernel's tree.
MARK = "NBDIST_BENCHMARK_KERNEL"
#: Seconds that a cell may take: a contestant that hangs is ended then, its kernel with it.
LIMIT = 120.0


class CellError(RuntimeError):
    """A cell raised: the error's type and the last line of its message."""

    def __init__(self, name: str, message: str) -> None:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        super().__init__(f"{name}: {lines[-1]}" if lines else name)


class Kernel:
    """A fresh kernel in an empty folder of its own, without GPUs; its temporary files are in that folder too.

    `version` is the folder of the nbdist that it imports.
    """

    def __init__(self, version: Path = ROOT) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="nbdist-bench-", ignore_cleanup_errors=True)
        self.mark = uuid.uuid4().hex
        self.shown = ""
        """The text that all cells have shown."""
        self.manager = KernelManager()
        self.manager.kernel_spec.argv = [  # not an installed kernelspec: the interpreter that runs this
            *(sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"),
            *("--HistoryManager.enabled=False", "--log-level=ERROR"),
        ]
        env = {
            **os.environ,
            "PYTHONPATH": str(version),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "TMPDIR": self.folder.name,
            "IPYTHONDIR": self.folder.name,
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
            MARK: self.mark,
        }
        self.manager.start_kernel(cwd=self.folder.name, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, limit: float = LIMIT) -> None:
        """Run a cell. Raises `CellError` for what the cell raises, `TimeoutError` after `limit` seconds."""
        self._execute(code, limit, {})

    def value(self, expression: str, limit: float = LIMIT) -> Any:
        """The value of an expression in the kernel, as far as JSON carries it. Raises as `run` does."""
        reply = self._execute(f"_value = {expression}", limit, {"value": "__import__('json').dumps(_value)"})
        found = reply["user_expressions"]["value"]
        if found["status"] != "ok":
            raise CellError(found["ename"], found["evalue"])
        return json.loads(ast.literal_eval(found["data"]["text/plain"]))

    def _execute(self, code: str, limit: float, expressions: dict[str, str]) -> dict[str, Any]:
        reply = self.client.execute_interactive(
            code, user_expressions=expressions, allow_stdin=False, timeout=limit, output_hook=self._keep
        )["content"]
        if reply["status"] != "ok":
            raise CellError(reply.get("ename", "the cell was aborted"), reply.get("evalue", ""))
        return dict(reply)

    def _keep(self, message: dict[str, Any]) -> None:
        self.shown += message["content"].get("text", "")

    def processes(self) -> list[psutil.Process]:
        """The kernel and all that it started, wherever that is in the process tree."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def close(self) -> None:
        """End the kernel and everything that it started, and remove its folder."""
        self.client.stop_channels()
        with contextlib.suppress(Exception):
            self.manager.shutdown_kernel(now=True)
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        self.folder.cleanup()
