"""The engine of a keeper: ranks on this machine that get the folder, search path and arguments of the notebook."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from ..wire.messages import Setting
from .local import LocalEngine, LocalRanks


class KeptEngine(LocalEngine):
    """The engine of ranks that work for another process than the one that starts them.

    Args:
        env: Environment variables for the ranks.
        start: The way to start ranks: "forkserver" or "spawn".
        setting: The state of the other process that fresh ranks take over.
    """

    def __init__(self, env: Mapping[str, str], start: str, setting: Setting) -> None:
        super().__init__(env, start)
        self.take(setting)

    def take(self, setting: Setting) -> None:
        """Give this setting to ranks that start from now on."""
        self._setting = setting
        os.environ.clear()
        os.environ.update(setting.environ)

    def start(self, world_size: int, notice: Callable[[str], None] | None = None, least: int | None = None) -> Any:
        ranks = super().start(world_size, notice, least)
        vars(ranks)["setting"] = functools.partial(self._setting_of, ranks)
        return ranks

    def _setting_of(self, ranks: LocalRanks, rank: int, environ: Any) -> Setting:
        own, given = LocalRanks.setting(ranks, rank, environ), self._setting
        return Setting(environ, given.cwd, given.path, given.argv, own.reads_memory, given.standard)
