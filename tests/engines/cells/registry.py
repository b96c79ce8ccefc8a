"""A package that registers an engine: the one of test_registry.py."""

# %% moon
from dataclasses import dataclass
from typing import ClassVar

from nbdist.engines.local import LocalEngine

started = []


@dataclass(frozen=True)
class MoonOptions:
    crater: str

    engine: ClassVar[str] = "moon"


class MoonEngine(LocalEngine):
    local = False  # so that nothing takes it for this machine's

    def __init__(self, options, env, start):
        super().__init__(env, start)
        self.options = options

    def start(self, world_size, notice=None, least=None):
        started.append((self.options, world_size))
        return super().start(world_size, notice, least)


def make(options, env, start):
    if start == "spawn":
        raise ValueError("there is no start='spawn' on the moon")
    return MoonEngine(options, env, start)
