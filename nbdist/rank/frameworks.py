"""Changes in torch, Lightning and `multiprocessing` for code that was written for torchrun or for one process."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
from typing import Any

from ..system.after_import import AfterImport


def install() -> None:
    """Change modules that are imported already, and other modules as soon as they are imported."""
    packages = "lightning_fabric", "pytorch_lightning", "lightning.fabric", "lightning.pytorch"
    accelerators = [f"{package}.accelerators.{kind}" for package in packages for kind in ("cpu", "cuda")]
    strategies = [f"{package}.strategies.ddp" for package in packages]
    groups = {"torch.distributed.distributed_c10d": default_group.patch}
    blocks = dict.fromkeys(["multiprocessing.shared_memory", "multiprocess.shared_memory"], _leave_to_owners)
    lightning = {**dict.fromkeys(accelerators, _count_ranks), **dict.fromkeys(strategies, _use_ranks)}
    sys.meta_path.insert(0, AfterImport({**groups, **blocks, **lightning}))


def _count_ranks(module: types.ModuleType) -> None:
    """Make Lightning's `devices="auto"` the ranks of this machine: on CPUs it is 1, and each rank trains alone."""
    for kind in ("CPUAccelerator", "CUDAAccelerator"):
        if hasattr(module, kind):
            getattr(module, kind).auto_device_count = staticmethod(lambda: int(os.environ["LOCAL_WORLD_SIZE"]))


def _use_ranks(module: types.ModuleType) -> None:
    """Make Lightning's `ddp_notebook`, `ddp_fork` and `ddp_spawn` use the ranks, as `ddp` does.

    By themselves they start more processes in each rank, which wait for the other ranks' processes forever.
    """
    cls: Any = module.DDPStrategy
    configure = cls._configure_launcher

    @functools.wraps(configure)
    def configure_launcher(self: Any) -> None:
        self._start_method = "popen"
        configure(self)

    cls._configure_launcher = configure_launcher


def _leave_to_owners(module: types.ModuleType) -> None:
    """Make a shared-memory block that this rank opens by its name outlive the rank.

    Each rank has one of Python's resource trackers, which also removes blocks that were only opened there (bpo-38119):
    the notebook would lose its block.
    """
    cls: Any = module.SharedMemory
    tracker: Any = importlib.import_module(f"{module.__package__}.resource_tracker")
    begin, unlink, made, opened = cls.__init__, cls.unlink, set[str](), set[str]()

    def __init__(self: Any, name: str | None = None, create: bool = False, size: int = 0, **options: Any) -> None:
        begin(self, name, create, size, **options)
        if create:
            made.add(self._name)
        elif self._name not in made and options.get("track", True) and tracker._resource_tracker._pid is not None:
            # The tracker is this rank's, not the notebook's as in a process of a context.
            opened.add(self._name)
            tracker.unregister(self._name, "shared_memory")

    def unlink_here(self: Any) -> None:
        if self._name in opened:
            opened.discard(self._name)
            tracker.register(self._name, "shared_memory")
        unlink(self)

    cls.__init__, cls.unlink = __init__, unlink_here


def forget_groups(module: Any) -> None:
    """Remove all groups from `torch.distributed.distributed_c10d`, as `destroy_process_group` does at its end.

    An interrupt may come before that end, or while torch makes a group: without a default group some may be left, and
    the count of groups. The count becomes the name of the next group. Ranks meet at that name, and none may be taken.
    """
    world = module._world
    if world.pg_names:
        module._unregister_all_process_groups()
    tables = world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config
    for table in (*tables, world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state):
        table.clear()
    world.group_count = 0


class DefaultGroup:
    """The process group that exists before the function runs; the function may start and end it as if it did not.

    `init_process_group` does nothing if it asks for this group. A later `destroy_process_group` ends only other groups,
    so that the next call of a session finds this one.
    """

    def __init__(self) -> None:
        self.started = False
        """True if the function has started the group that was up."""
        self._ended = False
        self._warned = False
        self._module: Any = None

    def begin_call(self) -> None:
        """Forget the groups that the function of the last call has started and ended."""
        self.started = self._ended = False

    def patch(self, module: types.ModuleType) -> None:
        """Replace both functions in `torch.distributed.distributed_c10d`, and in `torch.distributed`."""
        self._module = module
        package = sys.modules["torch.distributed"]
        for name, method in (("init_process_group", self._start), ("destroy_process_group", self._end)):
            original = getattr(module, name)
            replacement = functools.wraps(original)(functools.partial(method, original))
            setattr(module, name, replacement)
            if getattr(package, name, None) is original:  # imported in full
                setattr(package, name, replacement)

    def _start(self, start: Any, *args: Any, **kwargs: Any) -> None:
        asked = inspect.signature(start).bind(*args, **kwargs).arguments
        if asked.get("_ranks"):
            start(*args, **kwargs)
            return
        if not self._module.is_initialized():
            forget_groups(self._module)
            start(*args, **kwargs)
            return
        if difference := self._difference(asked):
            if not self._ended:
                raise ValueError(difference)
            inspect.unwrap(self._module.destroy_process_group)()
            self._ended = False
            start(*args, **kwargs)
            return
        self.started, self._ended = True, False
        if not self._warned:
            self._warned = True
            print("nbdist: the process group is up already, so init_process_group does nothing", file=sys.stderr)

    def _end(self, end: Any, group: Any = None) -> None:
        module = self._module
        if not self.started or not module.is_initialized() or group not in (None, module.GroupMember.WORLD):
            end(group)
            return
        self.started, self._ended = False, True
        for one in [one for one in module._world.pg_map if one is not module.GroupMember.WORLD]:
            end(one)

    def _difference(self, asked: dict[str, Any]) -> str:
        """Describe how the requested group differs from the existing one; "" if it does not."""
        module = self._module
        has = {"world_size": module.get_world_size(), "rank": module.get_rank()}
        wrong = {name: value for name, value in has.items() if asked.get(name, -1) not in (-1, value)}
        backends, backend = _backends(str(module.get_backend_config())), asked.get("backend")
        if backend is not None and not _backends(str(backend).lower()) <= backends:
            wrong = {"backend": "+".join(sorted(backends))}
        return "".join(
            f"the process group of rank {has['rank']} is up already: `{name}` must be {value!r}, got {asked[name]!r}. "
            f"Leave init_process_group out, or end that group by destroy_process_group() first"
            for name, value in list(wrong.items())[:1]
        )


default_group = DefaultGroup()


def _backends(config: str) -> set[str]:
    """Return the names in "gloo" or "cpu:gloo,cuda:nccl"."""
    return {part.rpartition(":")[2] for part in config.split(",")} - {"undefined"}
