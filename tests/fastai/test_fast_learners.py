"""`fast`: fastai's learners train as before, on batches from tensors and with fused steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.learner import AvgSmoothLoss, Learner, load_learner
from fastai.optimizer import SGD, Adam, Optimizer
from fastai.tabular.core import Categorify, FillMissing, Normalize, TabDataLoader, TabWeightedDL
from fastai.tabular.data import TabularDataLoaders
from fastai.tabular.learner import tabular_learner
from fastai.torch_core import set_seed

from nbdist import Session
from nbdist.fastai import fast
from nbdist.fastai.learners import FusedAdam, TabularLoader
from nbdist.recsys.datasets import synthetic_ratings

IMPORTS = "from fastai.collab import *\nfrom fastai.distributed import *"
WARM = IMPORTS


@pytest.fixture(scope="module")
def ratings() -> pd.DataFrame:
    return synthetic_ratings(n_users=100, n_items=80, n_ratings=3000).with_titles().to_pandas()


def collab(ratings: pd.DataFrame, bs: int = 64, **options: Any) -> Learner:
    set_seed(7)
    dls = CollabDataLoaders.from_df(ratings, item_name="title", bs=bs, seed=42)
    return collab_learner(dls, n_factors=8, y_range=(0, 5.5), **options)


def table(rows: int = 500) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"colour": draw.choice(list("abc"), rows), "size": draw.random(rows), "age": draw.random(rows)}
    )
    frame.loc[::7, "age"] = np.nan
    return frame.assign(price=frame["size"] * 3 + (frame["colour"] == "a"))


def tabular(**options: Any) -> Learner:
    set_seed(7)
    dls = TabularDataLoaders.from_df(
        table(),
        procs=[Categorify, FillMissing, Normalize],
        cat_names=["colour"],
        cont_names=["size", "age"],
        y_names="price",
        valid_idx=list(range(400, 500)),
        bs=32,
    )
    return tabular_learner(dls, layers=[16], **options)


def fit(learn: Learner, epochs: int = 1) -> Learner:
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(epochs, 5e-3, wd=0.1)
    return learn


@pytest.mark.parametrize("make", [collab, pytest.param(tabular, marks=pytest.mark.long("larger trainings"))])
def test_batches_are_those_of_fastai(make: Any, ratings: pd.DataFrame) -> None:
    learn = make(ratings) if make is collab else make()
    theirs = list(learn.dls.valid)
    fast(learn)
    ours = list(learn.dls.valid)
    assert len(ours) == len(learn.dls.valid) == len(theirs) and len(learn.dls.train.dataset) == len(learn.dls.train_ds)
    for own, original in zip(ours, theirs, strict=True):
        assert [part.dtype for part in own] == [part.dtype for part in original]
        assert all(map(torch.equal, own, original))
    rows = torch.cat([batch[0] for batch in learn.dls.train])
    assert len(rows) == len(learn.dls.train) * learn.dls.train.bs, "the last batch is left out, as fastai does"
    assert not torch.equal(rows, torch.cat([batch[0] for batch in learn.dls.train])), "another order each epoch"


@pytest.mark.parametrize("make", [collab, tabular])
def test_fused_steps_are_steps_of_adam(make: Any, ratings: pd.DataFrame) -> None:
    """Biases and norms without weight decay, a momentum that is scheduled, a state that either goes on with."""
    learn, plain = (fast(make(ratings) if make is collab else make()) for _ in range(2))
    plain.opt_func = Adam
    for loader in (*learn.dls, *plain.dls):
        loader.seed = 5  # the same order
    fit(learn, 2), fit(plain, 2)
    assert type(learn.opt) is FusedAdam and type(plain.opt) is Optimizer
    for own, original in zip(learn.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(own, original, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.stack(learn.recorder.losses), torch.stack(plain.recorder.losses))
    learn.opt.load_state_dict(plain.opt.state_dict())
    learn.opt.step()
    plain.opt.load_state_dict(learn.opt.state_dict())
    plain.opt.step()


@pytest.mark.long("larger trainings")
def test_a_fast_learner_is_a_fastai_learner(ratings: pd.DataFrame) -> None:
    learn = fit(fast(collab(ratings)), 2)
    at_the_end = learn.recorder.values[-1][1]
    before = learn.get_preds()[0]
    torch.testing.assert_close(before, collab_preds(learn, ratings))
    new = learn.dls.test_dl(ratings[:5])
    assert isinstance(new, TabDataLoader) and learn.get_preds(dl=new)[0].shape == (5,)
    assert learn.validate()[0] == pytest.approx(at_the_end)
    learn.dls.show_batch(max_n=2)
    fast(learn)  # twice is once
    assert all(isinstance(loader, TabularLoader) for loader in learn.dls)
    learn.lr_find(show_plot=False, num_it=20)


def collab_preds(learn: Learner, ratings: pd.DataFrame) -> torch.Tensor:
    original = collab(ratings).dls.valid
    return torch.cat([learn.model(batch[0]).detach() for batch in original])


def train(frame: pd.DataFrame, bs: int, epochs: int, quick: bool) -> tuple[Learner, int]:
    import fastai.distributed  # noqa: F401 (gives Learner distrib_ctx)

    learn = collab(frame, bs)
    learn = fast(learn) if quick else learn
    seen = 0

    def count(self: Any) -> None:
        nonlocal seen
        seen += len(self.xb[0]) if self.training else 0

    with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(), learn.added_cbs(Callback(before_batch=count)):
        learn.fit_one_cycle(epochs, 5e-3, wd=0.1)
    return learn, seen


def predicted(learn: Learner, rows: pd.DataFrame) -> torch.Tensor:
    with learn.no_bar():
        found: torch.Tensor = learn.get_preds(dl=learn.dls.test_dl(rows))[0].flatten()
    return found


def test_a_fast_learner_that_came_back_predicts(session: Session, ratings: pd.DataFrame, tmp_path: Path) -> None:
    learn, _ = session.run(train, ratings[:1000], 64, 1, True, imports=IMPORTS)
    rows = ratings[:6].drop(columns="rating")
    others = rows.assign(title=["no such film", *rows["title"][1:]], user=[rows["user"][0], 99_999, *rows["user"][2:]])
    known, strange = predicted(learn, rows), predicted(learn, others)
    assert strange.isfinite().all() and torch.equal(known[2:], strange[2:]) and not torch.equal(known[:1], strange[:1])
    learn.export(tmp_path / "learner.pkl")
    assert torch.equal(predicted(load_learner(tmp_path / "learner.pkl"), rows), known)
    with learn.no_bar():
        assert [len(learn.get_preds(ds_idx=number)[0]) for number in (0, 1)] == [800, 200]


@pytest.mark.long("larger trainings")
def test_ranks_divide_the_rows(session: Session, ratings: pd.DataFrame) -> None:
    alone = fit(fast(collab(ratings, 64)), 3).recorder.values[-1]
    learned, slowly = session.run(train, ratings, 32, 3, True), session.run(train, ratings, 32, 3, False)
    learn, seen = learned
    steps = len(ratings) * 8 // 10 // 2 // 32  # a fifth of the rows validates, and the last batch is left out
    assert seen == slowly[1] == 3 * steps * 32
    at_the_end = learn.recorder.values[-1][1]
    assert at_the_end == pytest.approx(alone[1], rel=0.02)
    assert type(learn.dls.train) is TabWeightedDL and type(learn.dls.valid) is TabWeightedDL, "as the notebook had them"
    assert learn.validate()[0] == pytest.approx(at_the_end, rel=1e-3)
    assert session.run_all(lambda: train(ratings[:2000], 32, 1, True)[0].model.u_bias.weight.sum().item())[0] != 0


@pytest.mark.long("larger trainings")
def test_ranks_train_by_themselves_for_some_steps(session: Session, ratings: pd.DataFrame) -> None:
    def locally(frame: pd.DataFrame) -> tuple[Learner, list[float], list[Any]]:
        import fastai.distributed  # noqa: F401

        learn = fast(fast(collab(frame, 32), 3), local_sgd_steps=16)
        weights: list[float] = []
        models: list[Any] = []

        def note(self: Any) -> None:
            if self.training:
                weights.append(self.model.u_bias.weight.sum().item())
            models.append(type(self.model).__name__)

        callback = Callback(before_batch=note)
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging(), learn.added_cbs(callback):
            learn.fit_one_cycle(2, 5e-3, wd=0.1)
            learn.fit_one_cycle(2, 5e-3, wd=0.1)
        return learn, weights, sorted(set(models))

    (learn, weights, models), (other, others, _) = session.run_all(locally, ratings, imports=IMPORTS)
    assert models == ["EmbeddingDotBias"], "nothing averages gradients"
    steps = len(ratings) * 8 // 10 // 2 // 32
    for epoch in range(4):
        alike = [step for step in range(steps) if weights[epoch * steps + step] == others[epoch * steps + step]]
        assert alike == [*range(0, steps, 16)]
    assert all(map(torch.equal, learn.model.parameters(), other.model.parameters()))
    alone = fit(fit(fast(collab(ratings, 64)), 2), 2).recorder.values[-1]
    assert learn.recorder.values[-1][1] == pytest.approx(alone[1], rel=0.1)
    assert learn.recorder.values[-1][1] == other.recorder.values[-1][1]
    assert learn.recorder.losses != other.recorder.losses, "each rank's own"
    assert [type(cb).__name__ for cb in learn.cbs].count("LocalSGD") == 1
    fit(learn)  # in the notebook it trains as any other
    assert type(learn.recorder.smooth_loss) is AvgSmoothLoss


def test_a_learner_that_fails_while_ranks_train_by_themselves(session: Session, ratings: pd.DataFrame) -> None:
    def cancelled(frame: pd.DataFrame) -> str:
        import fastai.distributed  # noqa: F401

        def stop(self: Any) -> None:
            if self.iter == 5:
                raise CancelFitException

        learn = fast(collab(frame, 32), 2)
        with learn.distrib_ctx(), learn.no_bar(), learn.no_logging():
            learn.fit(1, 1e-3, cbs=Callback(after_step=stop))
            learn.fit(1, 1e-3)
        return type(learn.model).__name__

    assert session.run_all(cancelled, ratings[:2000], imports=IMPORTS) == ["EmbeddingDotBias"] * 2
    for steps in (0, -1):
        with pytest.raises(ValueError, match=f"local_sgd_steps is {steps}"):
            fast(collab(ratings), local_sgd_steps=steps)


def test_every_callback_runs_in_ranks(session: Session, ratings: pd.DataFrame) -> None:
    """Also those given as functions, those on the instance, and those that cancel."""

    def heard(frame: pd.DataFrame) -> dict[str, int]:
        import fastai.distributed  # noqa: F401

        counts: dict[str, int] = {}

        class Hears(Callback):
            def before_fit(self) -> None:
                self.run_valid = False

            def after_batch(self) -> None:
                counts["class"] = counts.get("class", 0) + 1

            def after_cancel_fit(self) -> None:
                counts["cancelled"] = 1

        def count(name: str, self: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        def stop(self: Any) -> None:
            if self.epoch == 1:
                raise CancelFitException

        hears = Hears()
        learn = fast(collab(frame))
        with learn.no_bar(), learn.no_logging():
            learn.fit(3, 1e-3, cbs=[hears, Callback(before_step=partial(count, "step"), after_epoch=stop)])
        return counts | {"run": hears.run, "epochs": len(learn.recorder.values)}

    steps = 2 * (1600 // 64)
    assert session.run(heard, ratings[:2000], imports=IMPORTS) == {
        "step": steps,
        "class": steps,
        "cancelled": 1,
        "run": True,
        "epochs": 1,
    }


def test_fast_refuses_unknown_batch_transforms(ratings: pd.DataFrame) -> None:
    dls = CollabDataLoaders.from_df(ratings, item_name="title", bs=64, after_batch=[lambda batch: batch])
    with pytest.raises(TypeError, match="batch transforms"):
        fast(collab_learner(dls, n_factors=2))
    weighted = collab(ratings)
    weighted.dls.train.wgts = np.arange(4800) / np.arange(4800).sum()
    with pytest.raises(TypeError, match="weights"):
        fast(weighted)
    other = collab(ratings)
    other.dls.loaders = [torch.utils.data.DataLoader([1])] * 2
    with pytest.raises(TypeError, match="DataLoader"):
        fast(other)
    learn = fit(fast(collab(ratings, opt_func=SGD)))
    assert type(learn.opt) is Optimizer, "another optimizer stays as it is"
    learn = fit(fast(collab(ratings, opt_func=partial(Adam, lr=0.1, mom=0.8))))
    assert type(learn.opt) is FusedAdam and learn.lr == 0.1
