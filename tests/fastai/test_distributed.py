"""fastai on CPU ranks: `distrib_ctx` as on GPUs, the losses of a single process, a Learner that returns."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from conftest import LINUX, Kernel
from fastai.callback.core import Callback
from fastai.callback.schedule import fit_one_cycle  # noqa: F401 (gives Learner that method)
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import MSELossFlat
from fastai.torch_core import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbdist import Session, in_ddp, warm
from nbdist.fastai import distributed, fast
from nbdist.recsys.datasets import synthetic_ratings

IMPORTS = "from fastai.collab import *\nfrom fastai.distributed import *"


@pytest.fixture(scope="module")
def ratings() -> pd.DataFrame:
    warm(IMPORTS)
    return synthetic_ratings(n_users=300, n_items=400, n_ratings=16_000).with_titles().to_pandas()


def learner(ratings: pd.DataFrame, bs: int, **options: Any) -> Learner:
    dls = CollabDataLoaders.from_df(ratings, item_name="title", bs=bs, seed=42)
    return collab_learner(dls, y_range=(0, 5.5), **({"n_factors": 20} | options))


def train(ratings: pd.DataFrame, epochs: int = 1, bs: int = 32, lr: float = 5e-3, **options: Any) -> Learner:
    import fastai.distributed  # noqa: F401 (gives Learner distrib_ctx)

    learn = learner(ratings, bs, **options)
    with learn.distrib_ctx():
        learn.fit_one_cycle(epochs, lr, wd=0.1)
    return learn


def losses(learn: Learner) -> list[float]:
    """Train and valid loss of the last epoch."""
    return [float(value) for value in learn.recorder.values[-1]]


@pytest.mark.slow
def test_a_learner_returns_ready_for_use(session: Session, ratings: pd.DataFrame) -> None:
    learn = session.run(train, ratings[:8000], 2, lr=2e-2, imports=IMPORTS)
    assert isinstance(learn, Learner) and type(learn.model).__name__ == "EmbeddingDotBias"
    assert {p.device.type for p in learn.model.parameters()} == {"cpu"}
    assert not any("Distributed" in type(part).__name__ for part in [learn.model, learn.dls.train, *learn.cbs])
    assert len(learn.recorder.values) == 2 and len(learn.recorder.losses) == 2 * (6400 // 64)

    at_the_end = losses(learn)[1]
    predictions, targets = learn.get_preds()
    assert len(predictions) == len(targets) == 1600  # all of the validation set, not a rank's half
    valid = float(((predictions.squeeze() - targets.squeeze()) ** 2).mean())
    assert valid == pytest.approx(at_the_end, rel=0.01)
    assert valid < 0.95 * float(targets.float().var()), "the model learnt something"
    learn.recorder.plot_loss()
    # fastai's own collaborative learners do not know predict(row), but test_dl.
    some = learn.get_preds(dl=learn.dls.test_dl(ratings[:5]))[0]
    assert some.shape == (5,) and 0 <= some.min() <= some.max() <= 5.5
    before = learn.model.i_weight.weight.clone()
    with learn.no_bar():
        learn.fit_one_cycle(1, 5e-3)
    assert not torch.equal(before, learn.model.i_weight.weight) and len(learn.recorder.values) == 1
    again = session.run(lambda learn: learn.recorder.values, learn)
    assert again == learn.recorder.values


@pytest.mark.long("larger trainings")
def test_a_model_that_accelerate_does_not_wrap_trains_on_one_rank(ratings: pd.DataFrame) -> None:
    """Accelerate leaves it on a machine with one GPU, too."""

    def left() -> Learner:
        from accelerate import Accelerator

        Accelerator.prepare_model = lambda self, model, *_, **__: model  # type: ignore[method-assign]
        return train(ratings[:2000])

    learn = in_ddp(1, left, imports=IMPORTS)
    assert type(learn.model).__name__ == "EmbeddingDotBias" and len(learn.recorder.values) == 1


@pytest.mark.long("larger trainings")
def test_two_ranks_learn_what_one_process_learns(session: Session, ratings: pd.DataFrame) -> None:
    set_seed(42, reproducible=True)
    alone = learner(ratings, 64)
    with alone.no_bar(), alone.no_logging():
        alone.fit_one_cycle(2, 5e-3, wd=0.1)

    def seeded(ratings: pd.DataFrame) -> tuple[list[float], float]:
        set_seed(42, reproducible=True)
        learn = train(ratings, 2)
        return losses(learn), float(learn.model.i_weight.weight.sum())

    first, second = session.run_all(seeded, ratings)
    assert first[0][1] == pytest.approx(losses(alone)[1], rel=0.02)  # their batches are drawn otherwise
    assert first[0][1] == second[0][1] and first[1] == second[1], "the ranks hold one model"


@pytest.mark.skipif(not LINUX, reason="only on Linux a rank opens the memory of another")
@pytest.mark.parametrize("quickly", [None, (), (8,)], ids=["distrib_ctx", "fast", "local SGD"])
def test_a_training_waits_for_gloo_once(
    session: Session, ratings: pd.DataFrame, quickly: tuple[int, ...] | None
) -> None:
    """Ranks of one machine agree through gloo that they share memory; all else goes through that."""

    def asked(frame: pd.DataFrame) -> list[str]:
        import fastai.distributed  # noqa: F401

        learn = learner(frame, 32, n_factors=5)
        if quickly is not None:
            fast(learn, *quickly)
        with torch.profiler.profile() as profile, learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
            learn.fit_one_cycle(2, 5e-3)
        return sorted(event.name for event in profile.events() if event.name.startswith("gloo:"))

    session.run_all(train, ratings[:640], imports=IMPORTS)  # the first one sets that memory up
    assert session.run_all(asked, ratings[:640], imports=IMPORTS) == [["gloo:all_reduce"]] * 2


def test_options_for_ddp_are_the_users(session: Session, ratings: pd.DataFrame) -> None:
    def chosen(frame: pd.DataFrame) -> tuple[bool, bool, bool]:
        import fastai.distributed  # noqa: F401
        from accelerate import DistributedDataParallelKwargs

        found: list[Any] = []
        options = DistributedDataParallelKwargs(find_unused_parameters=True)
        learn, keep = learner(frame, 32), Callback(before_train=lambda self: found.append(self.learn.model))
        with learn.distrib_ctx(kwargs_handlers=[options]), learn.no_bar(), learn.no_logging(), learn.added_cbs(keep):
            accelerator = learn.distributed_trainer.accelerator
            learn.fit(1, 5e-3)
        return found[0].find_unused_parameters, found[0].broadcast_buffers, accelerator.ddp_handler is options

    assert session.run_all(chosen, ratings[:640], imports=IMPORTS) == [(True, True, True)] * 2


def test_the_loss_shown_is_the_mean_of_all_ranks(session: Session, ratings: pd.DataFrame) -> None:
    """The loss comes with the gradients; one that a callback has put in its place afterwards is gathered."""

    def recorded(frame: pd.DataFrame, doubled: bool) -> tuple[list[float], list[float]]:
        import fastai.distributed  # noqa: F401

        own: list[float] = []
        learn = learner(frame, 32)

        def double(self: Any) -> None:
            if doubled:
                self.learn.loss = 2 * self.loss
            own.append(float(self.loss))

        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(), learn.added_cbs(Callback(after_backward=double)):
            learn.fit(1, 5e-3)
        return own, [float(loss) for loss in learn.recorder.losses]

    for doubled in (False, True):
        (first, shown), (second, also_shown) = session.run_all(recorded, ratings[:1600], doubled, imports=IMPORTS)
        assert shown == also_shown and len(shown) == 20 and first != second
        smooth = 0.0
        for step, (one, other) in enumerate(zip(first, second, strict=True), 1):
            smooth = 0.98 * smooth + 0.02 * (one + other) / 2
            assert shown[step - 1] == pytest.approx(smooth / (1 - 0.98**step), rel=1e-4)


@pytest.mark.long("larger trainings")
@pytest.mark.parametrize("together", [True, False])
def test_a_learning_rate_is_found(session: Session, tmp_path: Path, together: bool) -> None:
    rows = synthetic_ratings(n_users=100, n_items=50, n_ratings=2000).with_titles().to_pandas()

    def find() -> tuple[float, bool, list[Path]]:
        learn = learner(rows, 64)
        learn.path = tmp_path
        before = [p.clone() for p in learn.model.parameters()]
        with learn.distrib_ctx() if together else nullcontext():
            found = learn.lr_find(show_plot=False, num_it=20)
        restored = all(map(torch.equal, before, learn.model.parameters()))
        dist.barrier()  # or the other rank may be at it still
        return found.valley, restored, sorted(tmp_path.rglob("_tmp*"))

    (rate, *first), (other, *second) = session.run_all(find, imports=IMPORTS)
    assert first == second == [True, []]
    assert 1e-7 < rate < 10 and (rate == other or not together)


def test_fastai_imported_inside_the_function_only(ratings: pd.DataFrame) -> None:
    def fn(frame: pd.DataFrame) -> list[float]:
        from fastai.collab import CollabDataLoaders, collab_learner
        from fastai.distributed import DistributedDL  # noqa: F401

        dls = CollabDataLoaders.from_df(frame, item_name="title", bs=32)
        learn = collab_learner(dls, n_factors=5, y_range=(0, 5.5))
        with learn.distrib_ctx():
            learn.fit_one_cycle(1, 5e-3)
        return losses(learn)

    assert np.isfinite(in_ddp(2, fn, ratings[:2000])).all()


def with_loaders_of_torch() -> Learner:
    import fastai.distributed  # noqa: F401 (gives Learner distrib_ctx)

    x = torch.randn(256, 4)
    rows = TensorDataset(x, x.sum(1, keepdim=True))
    loaders = DataLoaders(DataLoader(rows, 32, shuffle=True), DataLoader(rows, 32))
    learn = Learner(loaders, nn.Linear(4, 1), loss_func=MSELossFlat())
    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-2)
    return learn


def test_ranks_share_the_rows_of_loaders_of_torch(session: Session) -> None:
    learn = session.run(with_loaders_of_torch)
    assert len(learn.recorder.losses) == 256 // (2 * 32)
    assert type(learn.dls.train).__module__.startswith(("torch", "fastai"))


@pytest.mark.long("larger trainings")
@pytest.mark.slow
def test_no_warning_for_read_only_arrays_of_pandas(kernel: Kernel) -> None:
    """pandas 3 hands out read-only arrays, and torch warns of them once in each process."""
    kernel.ok("import numpy as np, pandas as pd\nfrom nbdist import Session, in_ddp")
    kernel.ok("frame = pd.DataFrame({'user': [1, 2] * 50, 'title': ['a', 'b', 'c', 'd'] * 25, 'rating': 3.0})")
    kernel.ok(
        "def batch():\n"
        "    from fastai.collab import CollabDataLoaders\n"
        "    from fastai.torch_core import tensor\n"
        "    fixed = np.ones(3)\n"
        "    fixed.flags.writeable = False\n"
        "    one = tensor(fixed)\n"
        "    one += 1\n"
        "    x, y = CollabDataLoaders.from_df(frame, item_name='title', bs=10).one_batch()\n"
        "    return tuple(x.shape), float(fixed.sum()), one.sum().item()"
    )
    for ranks in (2, 0):  # 0: in the kernel
        result = kernel.ok(f"in_ddp({ranks}, batch)")
        assert result.text == "((10, 2), 3.0, 6.0)\n", result.text


def test_batch_norm_trains_on_cpu_ranks(session: Session, ratings: pd.DataFrame) -> None:
    learn = session.run(train, ratings[:4000], 2, use_nn=True, layers=[20, 10], imports=IMPORTS)
    assert any(isinstance(module, torch.nn.BatchNorm1d) for module in learn.model.modules())
    first, last = (values[0] for values in learn.recorder.values)
    assert last < first and np.isfinite(losses(learn)).all()


def test_a_learner_of_the_caller_is_trained(session: Session, ratings: pd.DataFrame) -> None:
    def more(learn: Learner) -> tuple[Learner, float]:
        with learn.distrib_ctx():
            learn.fit_one_cycle(1, 5e-3)
        return learn, float(learn.model.u_bias.weight.detach().abs().sum())

    mine = learner(ratings[:1600], 32, n_factors=5)
    before = mine.model.u_bias.weight.detach().clone()
    learn, total = session.run(more, mine, imports=IMPORTS)
    assert torch.equal(mine.model.u_bias.weight, before), "the caller's own is left as it was"
    assert float(learn.model.u_bias.weight.detach().abs().sum()) == pytest.approx(total)
    assert total != pytest.approx(float(before.abs().sum()))
    assert learn.opt is not None and len(learn.recorder.values) == 1


class Seen(Callback):
    """Notes the rows that the model is trained on, and their number step by step."""

    def before_fit(self) -> None:
        self.rows: list[float] = []
        self.sizes: list[int] = []

    def before_batch(self) -> None:
        if self.training:
            self.rows += self.x.flatten().tolist()
            self.sizes.append(len(self.x))


@pytest.mark.parametrize("rows", [640, 650])
def test_ranks_share_the_rows_of_an_epoch(session: Session, rows: int) -> None:
    def fn() -> tuple[list[float], list[int]]:
        data = TensorDataset(torch.arange(rows).float()[:, None], torch.zeros(rows, 1))
        dls = DataLoaders.from_dsets(data, data, bs=32, device="cpu", drop_last=False)
        learn, seen = Learner(dls, torch.nn.Linear(1, 1), loss_func=torch.nn.MSELoss()), Seen()
        with learn.distrib_ctx():
            learn.fit(1, 1e-9, cbs=seen)
        return seen.rows, seen.sizes

    (first, sizes), (second, also) = session.run_all(fn, imports=IMPORTS)
    assert sizes == also and sum(sizes) == len(first) == len(second)
    assert sorted({*first, *second}) == list(range(rows)) and len(set(first) & set(second)) <= 1
    assert first != sorted(first), "the order is random"


def test_in_the_kernel_itself_fastai_is_as_before_afterwards(ratings: pd.DataFrame) -> None:
    from fastai.distributed import DistributedDL, DistributedTrainer

    patched = DistributedDL._broadcast, DistributedTrainer.before_fit, Learner.detach_distributed
    environ = dict(os.environ)
    learn = in_ddp(0, train, ratings[:2000], n_factors=5)
    assert np.isfinite(losses(learn)).all() and isinstance(learn, Learner)
    assert (DistributedDL._broadcast, DistributedTrainer.before_fit, Learner.detach_distributed) == patched
    assert not dist.is_initialized() and dict(os.environ) == environ
    with learn.no_bar():
        learn.fit(1)  # needs no group
    with pytest.raises(ZeroDivisionError):
        in_ddp(0, lambda: 1 / 0)
    assert DistributedDL._broadcast is patched[0]


def test_ranks_that_share_a_gpu_copy_a_loss_once(session: Session) -> None:
    def accumulated() -> tuple[float, list[str]]:
        import fastai.distributed  # noqa: F401 (which ranks patch)
        from fastai.learner import AvgSmoothLoss

        copies: list[str] = []

        class OnGpu(torch.Tensor):
            """A number that says that it is on a GPU."""

            device = torch.device("cuda", 0)

            def cpu(self, *args: Any) -> torch.Tensor:
                copies.append("cpu")
                return self.as_subclass(torch.Tensor)

        smooth = AvgSmoothLoss(beta=0.5)
        loss = torch.tensor(float(dist.get_rank())).as_subclass(OnGpu)
        smooth.accumulate(SimpleNamespace(loss=loss))
        return float(smooth.value), copies

    assert session.run_all(accumulated) == [(0.5, ["cpu"])] * 2  # the mean of both


class LossOnGpu:
    """A loss on a GPU, which counts how often it is copied to the CPU."""

    device = torch.device("cuda", 0)
    copies = 0

    def detach(self) -> LossOnGpu:
        return self

    def mean(self) -> LossOnGpu:
        return self

    def cpu(self) -> torch.Tensor:
        LossOnGpu.copies += 1
        return torch.tensor(3.0)


@pytest.mark.parametrize(("collectives", "copies"), [("cuda", 0), ("cpu", 1)])
def test_a_loss_is_copied_to_the_cpu_where_ranks_share_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, collectives: str, copies: int
) -> None:
    """To copy it, the host waits for the GPU, at each step."""
    loss, fastais = LossOnGpu(), []
    theirs = SimpleNamespace(
        accumulate=lambda smooth, learn: fastais.append(learn.loss), core=SimpleNamespace(maybe_gather=lambda x: x)
    )
    monkeypatch.setattr(distributed, "_fastai", theirs, raising=False)
    monkeypatch.setattr(distributed, "collective_device", lambda: torch.device(collectives))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(LossOnGpu, "copies", 0)
    smooth = SimpleNamespace(count=0, val=torch.tensor(1.0), beta=0.5)
    distributed._accumulate(smooth, SimpleNamespace(loss=loss))
    assert LossOnGpu.copies == copies and fastais == ([] if copies else [loss])
    assert float(smooth.val) == (2.0 if copies else 1.0)
