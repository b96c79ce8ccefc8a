"""`check="nan"`: what is named of numbers that are not finite, and what is no fault."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from nan_faults import FAULTS, net, run, with_row
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.data import TensorDataset

from nbdist import NotFinite, RankMismatch, Session
from nbdist.numerics.nan import active, nan_check

RANKS, OPTIONS, WARM = 2, {"devices": "cpu", "check": "nan"}, "import fastai.basics"


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str) -> None:
    fault = FAULTS[name]
    with pytest.raises(NotFinite) as caught, nan_check():
        run(fault)
    error = caught.value
    said = f"{error}\n{vars(error)}"
    assert error.step == fault.step, said
    assert fault.kind in (error.kind, "any"), said
    assert error.rows == fault.rows and (not fault.op or error.op == fault.op), said
    assert error.module and fault.module in ("", error.module), said


# ------------------------------------------------------------------------------------------------- what is no fault


def test_what_is_finite_goes_on() -> None:
    """Infinities that masks write, sparse gradients, half precision, unused parameters, and large norms."""
    table = nn.EmbeddingBag(10, 3, mode="sum", sparse=True)
    weights = nn.Parameter(torch.full((4,), 1e25))
    unused, masked = nn.Linear(2, 2), nn.Linear(3, 4)
    tables, dense = (
        torch.optim.SGD(table.parameters(), lr=0.0),
        torch.optim.SGD([weights, *masked.parameters()], lr=0.0),
    )
    with nan_check():
        for _ in range(3):
            scores = masked(table(torch.tensor([[1, 2], [3, 4]])))
            masks = torch.tensor([[False, True, True, False]])
            (scores.masked_fill(masks, -torch.inf).softmax(1) * weights).sum().backward()
            assert weights.grad is not None and unused.weight.grad is None
            tables.step()
            dense.step()
            tables.zero_grad()
            dense.zero_grad()
    half = nn.Linear(3, 1).to(torch.bfloat16)
    optimizer = torch.optim.SGD(half.parameters(), lr=1e-3)
    with nan_check():
        half(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()


def test_steps_that_a_scaler_leaves_out() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    with nan_check():
        for _ in range(9):
            optimizer.zero_grad()
            scaler.scale(1e3 * model(torch.ones(2, 3)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert 0 < scaler.get_scale() < 1e38 and all(one.isfinite().all() for one in model.parameters())


def test_no_graph_is_kept() -> None:
    """A pass without a step, as in an evaluation that forgets `no_grad`, must not keep the activations."""
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), nn.MSELoss()
    kept: list[weakref.ref[torch.Tensor]] = []
    model[0].register_forward_hook(lambda module, args, output: kept.append(weakref.ref(output)))
    with nan_check():
        for _ in range(5):
            loss(model(torch.ones(2, 3)), torch.ones(2, 1))
        gc.collect()
        assert len(kept) == 5 and not [one for one in kept if one() is not None]


def test_nothing_is_left_of_the_check() -> None:
    before = torch.autograd.backward, torch.amp.GradScaler.scale, list(sys.meta_path)
    with pytest.raises(ZeroDivisionError), nan_check():
        assert torch.autograd.backward is not before[0] and active() is not None
        raise ZeroDivisionError
    assert before == (torch.autograd.backward, torch.amp.GradScaler.scale, list(sys.meta_path)) and active() is None
    assert not nn.modules.module._global_forward_hooks
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks


def test_hooks_of_the_user_on_a_result_go_on() -> None:
    model, seen = nn.Linear(3, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nan_check() as check:
        for _ in range(5):
            result = model(torch.ones(2, 3))
            gone = result.register_hook(lambda gradient: seen.append("gone"))
            result.register_hook(lambda gradient: seen.append(gradient.tolist()))
            gone.remove()
            result.sum().backward()
            assert check._calls[-1].gradients[0].tolist() == [[1.0], [1.0]]
            optimizer.step()
    assert seen == 5 * [[[1.0], [1.0]]]


# ------------------------------------------------------------------------------------------------ other kinds of loops


def test_a_closure() -> None:
    """The forward and backward pass are inside the step, as Lightning and LBFGS have it."""
    model = net()()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    data = with_row(3, 2, 1, float("inf"))
    batch = torch.zeros(8, 3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        return loss

    def train() -> None:
        nonlocal batch
        for step in range(1, 9):
            batch = data(step)
            optimizer.step(closure)

    with pytest.raises(NotFinite, match=r"the loss of step 3 .* the batch has inf") as caught, nan_check():
        train()
    assert caught.value.rows == [2] and caught.value.values == [{"argument 1": batch[2].tolist()}]


def test_a_step_that_raises_is_over() -> None:
    """A loop that catches the error of a step goes on, and later steps are checked; also if a check was the error."""

    class Refusing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if len(steps) == 2:
                raise RuntimeError("out of memory")
            super().step()

    model, steps, found = nn.Linear(3, 1), [], []
    optimizer = Refusing(model.parameters(), lr=0.1)
    with nan_check():
        for step in range(1, 7):
            steps.append(step)
            optimizer.zero_grad()
            model(torch.ones(2, 3)).mean().backward()
            if step in (4, 5):
                model.weight.grad[0, 1] = float("nan")  # type: ignore[index]
            try:
                optimizer.step()
            except (RuntimeError, NotFinite) as error:
                found.append((step, type(error), getattr(error, "step", None)))
    assert found == [(2, RuntimeError, None), (4, NotFinite, 4), (5, NotFinite, 5)]


def test_the_first_of_two_calls_in_a_step_is_named() -> None:
    """Gradients of two batches are added up, and the first gradients are bad; a loop that catches this goes on."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).abs().sqrt().sum(1)

    model, found = Root(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with nan_check():
        for step in range(1, 8):
            optimizer.zero_grad()
            for part in range(2):
                batch = torch.ones(4, 3)
                if (step, part) in ((4, 0), (6, 1)):
                    batch[step - 3] = 0  # the slope of a root
                model(batch).mean().backward()
            try:
                optimizer.step()
            except NotFinite as error:
                found.append((step, error.op, error.rows))
    assert found == [(4, "sqrt", [1]), (6, "sqrt", [3])]


def test_two_optimizers_count_their_own_steps() -> None:
    one, other = nn.Linear(3, 1), nn.Linear(3, 1)
    both = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    data = with_row(4, 1, 0, float("nan"))
    with pytest.raises(NotFinite) as caught, nan_check():
        for step in range(1, 9):
            for model, optimizer in zip((one, other), both, strict=True):
                model(data(1 if model is one else step)).mean().backward()
                optimizer.step()
    assert (caught.value.step, caught.value.rows) == (4, [1])


def test_the_last_step_counts() -> None:
    """An update that makes a parameter infinite, and no step after it."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    said = r"parameter `weight` of rank 0 is -?inf after the update of step 1"
    with pytest.raises(NotFinite, match=said) as caught, nan_check():
        (1e30 * model(torch.ones(2, 3)).sum()).backward()
        optimizer.step()
    assert caught.value.parameter == "weight" and "a lower learning rate" in str(caught.value)


def trained(model: nn.Module, steps: int, frozen: bool = True) -> None:
    """Train a model, whose optimizer may also have the frozen parameters."""
    given = [one for one in model.parameters() if frozen or one.requires_grad]
    optimizer = torch.optim.SGD(given, lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("in_optimizer", [True, False])
def test_a_parameter_that_was_not_finite_before_the_training(frozen: bool, in_optimizer: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight[1, 1] = float("nan")
    model[0].requires_grad_(not frozen)
    said = "parameter `0.weight` of rank 0 is nan: no update of an optimizer made it so" + ", it is frozen" * frozen
    with pytest.raises(NotFinite, match=said) as caught, nan_check():
        trained(model, 3, in_optimizer)
    own = caught.value
    assert (own.step, own.kind, own.parameter) == (1, "parameter", "0.weight")
    assert "learning rate" not in str(own) and "checkpoint" in str(own)


class Masked(nn.Module):
    """A model with a mask of infinities in a frozen parameter, a parameter that is NaN and is not used, and a fault."""

    def __init__(self, fault_at: int) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(3, 3), nn.Parameter(torch.full((2,), float("nan")))
        self.mask = nn.Parameter(torch.tensor([0.0, 0.0, -float("inf")]), requires_grad=False)
        self.left = fault_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        weights = torch.softmax(self.layer(x) + self.mask, 1)
        return (weights[:, :2] if self.left else weights).log()


def test_a_frozen_mask_and_an_unused_parameter_are_no_fault() -> None:
    with nan_check():
        trained(Masked(0), 4)


def test_the_operation_is_named_beside_a_frozen_mask() -> None:
    with pytest.raises(NotFinite) as caught, nan_check():
        trained(Masked(3), 4)
    assert (caught.value.step, caught.value.op, caught.value.parameter) == (3, "log", "")


def test_an_error_arrives_whole() -> None:
    error = NotFinite("text", step=3, rank=1, kind="loss", op="log", module="a.b", rows=[4], values=[{"user": 5}])
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
    other = RankMismatch("text", step=3, tensor="weight", ranks=[1])
    assert vars(pickle.loads(pickle.dumps(other))) == vars(other)


# ------------------------------------------------------------------------------------------------------------ on ranks


def ddp(fault: str, culprit: int) -> None:
    """Train with a fault on one rank, whose gradients all ranks get."""
    own = FAULTS[fault]
    torch.manual_seed(0)
    model = DistributedDataParallel(own.model())
    optimizer = own.optimizer(model.parameters(), lr=own.rate)  # type: ignore[call-arg]
    for step in range(1, 9):
        optimizer.zero_grad()
        batch = own.data(step if dist.get_rank() == culprit else 10**6 + step)
        own.loss(model(batch), batch).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "fault", ["a zero in a logarithm of the model", "the root of zero, in the backward pass", "an infinite feature"]
)
def test_the_rank_is_named(session: Session, fault: str) -> None:
    with pytest.raises(NotFinite) as caught:
        session.run(ddp, fault, 1)
    own, error = FAULTS[fault], caught.value
    assert (error.rank, error.step, error.module, error.rows) == (1, own.step, own.module, own.rows), error
    text = error.__cause__.text  # type: ignore[union-attr]
    assert "optimizer.step()" in text or ".backward()" in text
    assert f"numerics{os.sep}nan.py" not in text, "its frames are of no use"
    assert session.run(ddp, fault, 5) is None, "the next call is checked, and right"


def fastai_fit() -> None:
    from fastai.basics import DataLoaders, Learner
    from fastai.data.load import DataLoader

    rows = TensorDataset(torch.ones(64, 3), torch.ones(64, 1))
    rows.tensors[0][43, 1] = torch.nan
    batches = DataLoader(rows, bs=8)
    Learner(DataLoaders(batches, batches), net()(), loss_func=nn.MSELoss()).fit(1, 1e-3)


def test_a_learner_of_fastai(session: Session) -> None:
    with pytest.raises(NotFinite, match=r"the loss of step 6 .* the batch has nan") as caught:
        session.run(fastai_fit)
    assert caught.value.rows == [3] and caught.value.module == "Sequential"
