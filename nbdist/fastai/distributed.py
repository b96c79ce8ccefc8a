"""fastai's `distrib_ctx` on gloo and on NCCL: functions that replace fastai's own."""

from __future__ import annotations

import operator
import sys
import types
from typing import TYPE_CHECKING, Any

from ..devices import collective_device, rank_device
from .replacing import Originals, replace

if TYPE_CHECKING:
    from ..shm.process_group import SharedGroup


class _Fastai:
    """The parts of fastai that are used here, with the original functions that this module replaces.

    Args:
        module: `fastai.distributed`.
    """

    def __init__(self, module: types.ModuleType) -> None:
        self.core = sys.modules["fastai.torch_core"]
        self.smooth_loss = sys.modules["fastai.learner"].AvgSmoothLoss
        self.loader, self.trainer, self.learner = module.DistributedDL, module.DistributedTrainer, module.Learner
        self.event = module.event
        self.before_fit, self.detach = self.trainer.before_fit, self.learner.detach_distributed
        self.gather, self.accumulate = self.core.maybe_gather, self.smooth_loss.accumulate


class _Training:
    """The current training, or the last one."""

    group: SharedGroup | None = None
    """The group whose ranks share memory. None: they cannot."""
    carried: tuple[Any, Any] | None = None
    """The loss of a batch, until its mean over all ranks is asked for: the mean was computed together with the
    gradients."""

    def usable(self) -> SharedGroup | None:
        """Return the group if its ranks still share memory."""
        return self.group if self.group is not None and self.group.usable else None


_fastai: _Fastai
_training = _Training()


def patch_distributed(module: types.ModuleType) -> Originals:
    """Replace fastai's functions by the functions of this module, unless they are replaced already."""
    global _fastai, _training
    if module.DistributedDL._broadcast.__module__ == __name__:
        return []
    own, _training = _Fastai(module), _Training()
    _fastai = own
    return replace(
        [
            (own.loader, "_broadcast", _broadcast),
            (own.trainer, "before_fit", _before_fit),
            (own.trainer, "_wrap_dl", _wrap_dl),
            (own.trainer, "after_fit", _after_fit),
            (own.learner, "detach_distributed", _detach_distributed),
            (own.learner, "__call__", _call),
            (own.learner, "_call_one", _call_one),
            (own.core, "maybe_gather", _maybe_gather),
            (own.smooth_loss, "accumulate", _accumulate),
        ]
    )


def _broadcast(self: Any, t: Any, rank: int) -> list[int]:
    "Broadcast `t` from `rank` to all other ranks; every rank returns the same list."
    import numpy as np
    import torch
    import torch.distributed as dist

    indices = torch.from_numpy(np.array(t, np.int64)).to(collective_device())
    dist.broadcast(indices, rank, group=_training.usable())
    return list(indices.tolist())


def _before_fit(self: Any) -> None:
    import torch
    import torch.distributed as dist

    from ..shm.process_group import shared_group

    if self.sync_bn and collective_device().type == "cpu":
        self.sync_bn = False
        norms = [m for m in self.model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        if norms and dist.get_rank() == 0:
            print("nbdist: CPU ranks have no SyncBatchNorm; each normalises over its own part of the batch")
    for parameter in self.model.parameters():
        if parameter.numel() == 0:
            parameter.requires_grad_(False)
    _training.group = group = shared_group() if rank_device().type == "cpu" else None
    given = self.accelerator.ddp_handler
    if group is not None:
        self.accelerator.ddp_handler = _Through(group, given)
    try:
        _fastai.before_fit(self)
    finally:
        self.accelerator.ddp_handler = given
    if group is not None and not getattr(self.learn.model, "_comm_hooks", True):  # not another library's
        self.learn.model.register_comm_hook(self.learn, _mean_of_gradients)


def _mean_of_gradients(learn, bucket):  # type: ignore[no-untyped-def] # torch compares annotations with its own types
    "Average the gradients of a bucket over all ranks; with the last bucket, also average the loss."
    import torch

    assert _training.group is not None
    more = []
    if bucket.is_last():
        more.append(learn.loss.detach().as_subclass(torch.Tensor).mean())
        _training.carried = learn.loss, *more
    future: Any = torch.futures.Future()
    future.set_result(_training.group.collectives.mean_(bucket.buffer(), *more))
    return future


def _accumulate(self: Any, learn: Any) -> None:
    import torch

    came, _training.carried = _training.carried, None
    if came is not None and came[0] is learn.loss:  # of this step, and no callback has put another in its place
        mean = came[1].as_subclass(type(learn.loss))
    elif _through_cpu(learn.loss):
        mean = _fastai.core.maybe_gather(learn.loss.detach().mean().cpu())  # and not back to the GPU, and here again
    else:
        _fastai.accumulate(self, learn)
        return
    self.count += 1
    self.val = torch.lerp(mean, self.val, self.beta)


def _through_cpu(x: Any) -> bool:
    "Return whether `x` is on a GPU that ranks share, so that they communicate through gloo"
    import torch.distributed as dist

    return x.device.type == "cuda" and dist.is_initialized() and collective_device().type == "cpu"


def _maybe_gather(x: Any, axis: int = 0) -> Any:
    "Gather copies of `x` on `axis` (if training is distributed)"
    import torch

    if _through_cpu(x):
        return _fastai.gather(x.cpu(), axis).to(x.device)
    through = _training.usable()
    if through is None or x.device.type != "cpu" or x.is_sparse:
        return _fastai.gather(x, axis)
    plain = x.as_subclass(torch.Tensor)  # an operation of fastai's takes three times as long
    shared = through.collectives
    whole = torch.cat(shared.gather(plain), dim=axis) if x.ndim else shared.mean_(plain.detach().clone())
    return whole.as_subclass(type(x))


def _wrap_dl(self: Any, dl: Any) -> Any:
    if getattr(dl, "sharded", False) is True or isinstance(dl, _fastai.loader):
        return dl
    if hasattr(type(dl), "divide"):
        return dl.divide(_training.group)
    return _fastai.loader(dl, device=rank_device())


def _after_fit(self: Any) -> None:
    import torch

    model = self.learn.model
    # Accelerate leaves the model of a single rank with a GPU as it is.
    self.learn.model = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    self.learn.dls.loaders = self.old_dls


def _call(self: Any, event_name: Any) -> None:
    for name in [event_name] if isinstance(event_name, str) else event_name:
        self._call_one(name)


def _call_one(self: Any, event_name: str) -> None:
    if not hasattr(_fastai.event, event_name):
        raise Exception(f"missing {event_name}")
    for cb in sorted(self.cbs, key=_order):
        # At the end of a training each makes itself ready for the next.
        if event_name == "after_fit" or hasattr(type(cb), event_name) or event_name in vars(cb):
            cb(event_name)


_order = operator.attrgetter("order")


def _detach_distributed(self: Any) -> Any:
    "Remove `DistributedTrainer` from a learner"
    _fastai.detach(self)
    return self.remove_cb(_fastai.trainer)


class _Through:
    """The user's options of accelerate for `DistributedDataParallel`, if any, with the process group."""

    def __init__(self, group: Any, given: Any) -> None:
        self._group, self._given = group, given

    def to_kwargs(self) -> dict[str, Any]:
        return {"process_group": self._group, **(self._given.to_kwargs() if self._given else {})}

    def register_comm_hook(self, model: Any) -> None:
        if self._given:
            self._given.register_comm_hook(model)
