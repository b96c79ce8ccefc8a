"""fastai's `distrib_ctx` on gloo and on NCCL."""

from __future__ import annotations

import operator
import sys
import types
from typing import Any

from .replacing import Originals, replace


def patch_distributed(module: types.ModuleType) -> Originals:
    import numpy as np
    import torch
    import torch.distributed as dist

    from ..devices import collective_device, rank_device
    from ..shm.process_group import SharedGroup, shared_group

    core = sys.modules["fastai.torch_core"]
    loader, trainer, learner = module.DistributedDL, module.DistributedTrainer, module.Learner
    prepare, detach, gather = trainer.before_fit, learner.detach_distributed, core.maybe_gather
    smooth = sys.modules["fastai.learner"].AvgSmoothLoss
    accumulate = smooth.accumulate
    #: Of the training that goes on, or the last one; None where ranks cannot share memory.
    group: SharedGroup | None = None
    #: A batch's loss, and its mean over all ranks, which came with the gradients; until it is asked for.
    carried: tuple[Any, Any] | None = None

    def usable() -> SharedGroup | None:
        return group if group is not None and group.usable else None

    def _broadcast(self: Any, t: Any, rank: int) -> list[int]:
        "Broadcast `t` from `rank` to all other ranks; every rank returns the same list."
        indices = torch.from_numpy(np.array(t, np.int64)).to(collective_device())
        dist.broadcast(indices, rank, group=usable())
        return list(indices.tolist())

    def before_fit(self: Any) -> None:
        if self.sync_bn and collective_device().type == "cpu":
            self.sync_bn = False
            norms = [m for m in self.model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
            if norms and dist.get_rank() == 0:
                print("nbdist: CPU ranks have no SyncBatchNorm; each normalises over its own part of the batch")
        for parameter in self.model.parameters():
            if parameter.numel() == 0:
                parameter.requires_grad_(False)
        nonlocal group
        group = shared_group() if rank_device().type == "cpu" else None
        given = self.accelerator.ddp_handler
        if group is not None:
            self.accelerator.ddp_handler = _Through(group, given)
        try:
            prepare(self)
        finally:
            self.accelerator.ddp_handler = given
        if group is not None and not getattr(self.learn.model, "_comm_hooks", True):  # not another library's
            self.learn.model.register_comm_hook(self.learn, mean_of_gradients)

    def mean_of_gradients(learn, bucket):  # type: ignore[no-untyped-def] # torch compares annotations with its own types
        assert group is not None
        nonlocal carried
        more = []
        if bucket.is_last():
            more.append(learn.loss.detach().as_subclass(torch.Tensor).mean())
            carried = learn.loss, *more
        future: Any = torch.futures.Future()
        future.set_result(group.collectives.mean_(bucket.buffer(), *more))
        return future

    def accumulate_smoothly(self: Any, learn: Any) -> None:
        nonlocal carried
        came, carried = carried, None
        if came is not None and came[0] is learn.loss:  # of this step, and no callback has put another in its place
            mean = came[1].as_subclass(type(learn.loss))
        elif through_cpu(learn.loss):
            mean = core.maybe_gather(learn.loss.detach().mean().cpu())  # and not back to the GPU, and here again
        else:
            accumulate(self, learn)
            return
        self.count += 1
        self.val = torch.lerp(mean, self.val, self.beta)

    def through_cpu(x: Any) -> bool:
        "Say whether `x` is on a GPU that ranks share, so that they talk through gloo"
        return x.device.type == "cuda" and dist.is_initialized() and collective_device().type == "cpu"

    def maybe_gather(x: Any, axis: int = 0) -> Any:
        "Gather copies of `x` on `axis` (if training is distributed)"
        if through_cpu(x):
            return gather(x.cpu(), axis).to(x.device)
        through = usable()
        if through is None or x.device.type != "cpu" or x.is_sparse:
            return gather(x, axis)
        plain = x.as_subclass(torch.Tensor)  # an operation of fastai's takes three times as long
        shared = through.collectives
        whole = torch.cat(shared.gather(plain), dim=axis) if x.ndim else shared.mean_(plain.detach().clone())
        return whole.as_subclass(type(x))

    def _wrap_dl(self: Any, dl: Any) -> Any:
        if getattr(dl, "sharded", False) is True or isinstance(dl, loader):
            return dl
        return dl.divide(group) if hasattr(type(dl), "divide") else loader(dl, device=rank_device())

    def after_fit(self: Any) -> None:
        model = self.learn.model
        # Accelerate leaves the model of a single rank with a GPU as it is.
        self.learn.model = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
        self.learn.dls.loaders = self.old_dls

    def call(self: Any, event_name: Any) -> None:
        for name in [event_name] if isinstance(event_name, str) else event_name:
            self._call_one(name)

    def _call_one(self: Any, event_name: str) -> None:
        if not hasattr(module.event, event_name):
            raise Exception(f"missing {event_name}")
        for cb in sorted(self.cbs, key=_order):
            # At the end of a training each makes itself ready for the next.
            if event_name == "after_fit" or hasattr(type(cb), event_name) or event_name in vars(cb):
                cb(event_name)

    def detach_distributed(self: Any) -> Any:
        "Remove `DistributedTrainer` from a learner"
        detach(self)
        return self.remove_cb(trainer)

    patched = [
        (loader, "_broadcast", _broadcast),
        (trainer, "before_fit", before_fit),
        (trainer, "_wrap_dl", _wrap_dl),
        (trainer, "after_fit", after_fit),
        (learner, "detach_distributed", detach_distributed),
        (learner, "__call__", call),
        (learner, "_call_one", _call_one),
        (core, "maybe_gather", maybe_gather),
        (smooth, "accumulate", accumulate_smoothly),
    ]
    return replace(patched)


_order = operator.attrgetter("order")


class _Through:
    """The user's options of accelerate for `DistributedDataParallel`, if any, with the process group."""

    def __init__(self, group: Any, given: Any) -> None:
        self._group, self._given = group, given

    def to_kwargs(self) -> dict[str, Any]:
        return {"process_group": self._group, **(self._given.to_kwargs() if self._given else {})}

    def register_comm_hook(self, model: Any) -> None:
        if self._given:
            self._given.register_comm_hook(model)
