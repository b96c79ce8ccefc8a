"""fastai's tabular and collaborative learners, with less overhead in each training step."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from fastai.callback.core import Callback
from fastai.learner import AvgSmoothLoss, Learner
from fastai.optimizer import Optimizer, adam_step, average_grad, average_sqr_grad, step_stat, weight_decay
from fastai.tabular.core import ReadTabBatch, TabDataLoader
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adamw import adamw

from ..recsys.loader import MemoryLoader
from ..recsys.parallel.buffers import average

__all__ = ["fast"]

_ADAM = [weight_decay, average_grad, average_sqr_grad, step_stat, adam_step]


def fast(learn: Learner, local_sgd_steps: int | None = None) -> Learner:
    """Make a tabular or collaborative learner train in a fraction of the time, and return it.

    The result is still a fastai learner, with its model, metrics, callbacks, schedules, recorder, `get_preds` and
    `show_results`. Its loaders do not select rows of a data frame for each batch, but gather them from tensors, which
    are a copy in memory. A step of Adam is one operation instead of six for each parameter. The losses are the same
    within noise: in training each row comes once an epoch, while fastai 2.8 draws rows with replacement.

    Under `distrib_ctx` the rows are divided among the ranks, as fastai divides them. A learner that is returned to the
    notebook has its own loaders again.

    A step of a small model takes as long for half the rows, so ranks that wait for each other in each step gain
    nothing. With `local_sgd_steps` each rank makes this number of steps by itself before the ranks average their
    weights (local SGD), and once more at the end of an epoch. Start with 64 for steps of 256 rows, and with 4 for
    4,096. Losses that are recorded and shown in training are then rank 0's own, and each rank keeps its own state of
    the optimizer.

    Args:
        learn: The learner of `collab_learner` or `tabular_learner`, or a `Learner` whose data are `TabularPandas`.
        local_sgd_steps: The number of steps that each rank takes by itself, under `distrib_ctx`, before weights are
            averaged. None: gradients are averaged in each step.

    Raises:
        ValueError: `local_sgd_steps` is below 1.
        TypeError: A loader is not fastai's tabular one, or transforms its batches, or draws rows by weights.

    Examples:
        >>> from fastai.collab import CollabDataLoaders, collab_learner
        >>> from nbdist.recsys.datasets import synthetic_ratings
        >>> from nbdist.fastai import fast
        >>> ratings = synthetic_ratings(n_users=50, n_items=20, n_ratings=400).frame.to_pandas()
        >>> learn = fast(collab_learner(CollabDataLoaders.from_df(ratings, bs=64), n_factors=5, y_range=(0, 5.5)))
        >>> with learn.no_bar(), learn.no_logging():
        ...     learn.fit_one_cycle(2, 5e-3, wd=0.1)
        >>> len(learn.recorder.losses)
        10
    """
    if local_sgd_steps is not None and local_sgd_steps < 1:
        raise ValueError(f"local_sgd_steps is {local_sgd_steps}: give 1 or more, or None to average gradients")
    learn.dls.loaders = [loader if isinstance(loader, TabularLoader) else _loader(loader) for loader in learn.dls]
    function = learn.opt_func
    if isinstance(function, partial):  # fastai looks for a learning rate among its keywords
        learn.opt_func = partial(_fused, function.func, *function.args, **function.keywords)
    else:
        learn.opt_func = partial(_fused, function)
    if learn.opt is not None:
        _fuse(learn.opt)
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, LocalSGD)])
    if local_sgd_steps is not None:
        learn.add_cb(LocalSGD(local_sgd_steps))
    return learn


class TabularLoader(MemoryLoader):
    """The batches of a fastai loader, made from tensors; all other attributes come from that loader.

    Args:
        original: The fastai loader.
        data: The rows of the loader, as `TabularPandas` makes batches of them.
        divided: Whether the rows are divided among the ranks.
        group: The process group in which ranks agree on the order of divided rows. None: the default process group.
    """

    def __init__(
        self, original: TabDataLoader, data: tuple[torch.Tensor, ...], divided: bool = False, group: Any = None
    ) -> None:
        self.original, self.sharded, self._data, self._group = original, divided, data, group
        super().__init__(
            data,
            original.bs,
            shuffle=original.shuffle,
            remainder="drop" if original.drop_last else "keep",
            device=original.device,
            rank=None if divided else 0,
            world_size=None if divided else 1,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.original,)

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # not there yet
            raise AttributeError(name)
        return getattr(self.original, name)

    @property
    def dataset(self) -> Any:
        """Return fastai's data set."""
        return self.original.dataset

    def divide(self, group: Any = None) -> TabularLoader:
        """Return a loader with this rank's share; `group` has all ranks."""
        return TabularLoader(self.original, self._data, divided=True, group=group)

    def new(self, dataset: Any = None, **options: Any) -> Any:
        """Return a loader of the same rows. For another `dataset`, return fastai's own loader."""
        if dataset is None or dataset is self.dataset:
            return super().new(**options)
        return self.original.new(dataset, **options)


def _itself(loader: TabDataLoader) -> TabDataLoader:
    return loader


def _loader(original: Any) -> TabularLoader:
    if not isinstance(original, TabDataLoader):
        raise TypeError(
            f"fast() is for fastai's tabular and collaborative learners; this one has a {type(original).__name__}"
        )
    more = [type(one).__name__ for one in original.after_batch.fs if not isinstance(one, ReadTabBatch)]
    if more:
        raise TypeError(
            f"fast() does not know the batch transforms {', '.join(more)}: remove them, or do without fast()"
        )
    if np.ptp(getattr(original, "wgts", 0.0)) > 1e-12:
        raise TypeError("fast() does not draw rows by weights, as this learner's training loader does")
    rows = original.dataset
    # A frame's array holds a column's values side by side; a row's are gathered in a fraction of the time.
    data = [torch.tensor(np.ascontiguousarray(rows.cats.to_numpy(), np.int64))]
    if rows.with_cont:
        data.append(torch.tensor(np.ascontiguousarray(rows.conts.to_numpy(), np.float32)))
    if set(rows.y_names) <= set(rows.items.columns):
        data.append(torch.tensor(rows.targ.to_numpy()))
    return TabularLoader(original, tuple(data))


class FusedAdam(Optimizer):
    """fastai's Adam with decoupled weight decay, with a step in one operation and the same state."""

    def step(self, closure: Any = None) -> None:
        """Update the parameters from their gradients."""
        trained = self.all_params(with_grad=True)
        if closure is not None or any(p.grad.is_sparse for p, *_ in trained):
            super().step(closure)
            return
        groups: dict[tuple[Any, ...], list[tuple[torch.Tensor, dict[str, Any]]]] = {}
        for p, _, state, hyper in trained:
            if not isinstance(state.get("step"), torch.Tensor):
                state["step"] = torch.tensor(float(state.get("step", 0)), device=p.device)
            for name in ("grad_avg", "sqr_avg"):
                if name not in state:
                    state[name] = torch.zeros_like(p)
            decay = hyper["wd"] if state.get("do_wd", True) else 0.0
            key = p.device, p.dtype, decay, *(hyper[name] for name in ("lr", "mom", "sqr_mom", "eps"))
            groups.setdefault(key, []).append((p, state))
        with torch.no_grad():
            for (_, _, decay, lr, mom, sqr_mom, eps), members in groups.items():
                adamw(
                    [p for p, _ in members],
                    [p.grad for p, _ in members],  # type: ignore[misc]
                    [state["grad_avg"] for _, state in members],
                    [state["sqr_avg"] for _, state in members],
                    [],
                    [state["step"] for _, state in members],
                    fused=True,
                    amsgrad=False,
                    beta1=mom,
                    beta2=sqr_mom,
                    lr=lr,
                    weight_decay=decay,
                    eps=eps,
                    maximize=False,
                )


def _fused(function: Any, *args: Any, **options: Any) -> Any:
    return _fuse(function(*args, **options))


def _fuse(optimizer: Any) -> Any:
    """Make fastai's Adam take fused steps; other optimizers do not change."""
    if type(optimizer) is Optimizer and [getattr(cb, "func", cb) for cb in optimizer.cbs] == _ADAM:
        optimizer.__class__ = FusedAdam
    return optimizer


class LocalSGD(Callback):
    """A callback under `distrib_ctx`: ranks train by themselves, and average their weights every `steps` steps."""

    order = 10  # before `DistributedTrainer`, which is to find after a training what it has made before it

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._parallel: DistributedDataParallel | None = None

    def before_train(self) -> None:
        """Remove the wrapper that averages gradients from the model."""
        model = self.learn.model
        if isinstance(model, DistributedDataParallel):
            self._parallel, self.learn.model = model, model.module
            self.recorder.smooth_loss.__class__ = _OwnLoss

    def after_batch(self) -> None:
        """Average the weights if it is time."""
        if self.training and (self.iter + 1) % self.steps == 0:
            self._average()

    def after_train(self) -> None:
        """Average the weights, so that all ranks validate and return the same model."""
        self._average()

    def after_fit(self) -> None:
        """Put the wrapper back."""
        if self._parallel is not None:
            self.learn.model, self._parallel = self._parallel, None
            self.recorder.smooth_loss.__class__ = AvgSmoothLoss

    def _average(self) -> None:
        if self._parallel is not None:
            everything = chain(self.model.parameters(), self.model.buffers())
            average([tensor for tensor in everything if tensor.is_floating_point()], self._parallel.process_group)


class _OwnLoss(AvgSmoothLoss):
    """The smoothed loss of this rank's own batches."""

    val: torch.Tensor

    def accumulate(self, learn: Learner) -> None:
        self.count += 1
        self.val = torch.lerp(learn.loss.detach().mean(), self.val, self.beta)
