"""Objects of torch that need their own way: each cell is a case of test_torch_objects.py."""

# %% modules that are kinds of modules of their own
import six
import torch
import torch.backends.cudnn as cudnn


def seed_everything(seed):
    torch.manual_seed(seed)
    cudnn.deterministic = True
    return torch.rand(1).item(), torch.backends.cudnn.deterministic, torch.ops.aten.relu(torch.tensor([-1.0])).item()


torch.manual_seed(3)
aten = torch.ops.aten
expected = torch.rand(1).item(), True, 0.0
assert in_ddp(2, seed_everything, 3) == expected
assert in_ddp(1, lambda: (aten.add(torch.ones(1), 1).item(), six.moves.urllib.parse.quote("a b"))) == (2.0, "a%20b")
with Session(1) as session:
    assert session.run(seed_everything, 3) == expected
    named = {"packet": aten.mul, "overload": aten.add.Tensor}
    assert session.run(lambda: named["packet"](named["overload"](torch.ones(1), 2), 3).item()) == 9.0
    packet, overload = session.run(lambda: [torch.ops.aten.mul, torch.ops.aten.add.Tensor])
    assert packet is aten.mul and overload is aten.add.Tensor

# %% TorchScript: functions, traced models, and parameters that an optimizer has
import torch
from torch import nn


@torch.jit.script
def square(x):
    return x * x


traced = torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1))
scripted = torch.jit.script(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)))
optimizer = torch.optim.SGD(scripted.parameters(), 0.1)


def step():
    weight = next(scripted.parameters())
    before = weight.item()
    scripted(torch.ones(4, 1)).sum().backward()
    weight.grad.fill_(1.0)
    optimizer.step()
    return before, weight.item(), scripted, optimizer


assert in_ddp(2, lambda: square(torch.tensor(3.0)).item()) == 9.0
assert in_ddp(1, lambda: traced(torch.ones(1, 1))).item() == traced(torch.ones(1, 1)).item()
forward = traced.forward


def changed():
    traced.weight.data.fill_(2.0)
    return forward(torch.ones(1, 1)).item() - traced.bias.item()


assert abs(in_ddp(1, changed) - 2.0) < 1e-6
before, after, model, own = in_ddp(1, step)
assert abs(before - after - 0.1) < 1e-6 and next(model.parameters()).item() == after
assert own.param_groups[0]["params"][0] is next(model.parameters())
assert model(torch.ones(4, 1)).shape == (4, 1)

# %% an operator of a cell, by its own name and by torch's
import torch


@torch.library.custom_op("cells::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x):
    return torch.empty_like(x)


triple.register_autograd(lambda ctx, g: g * 3, setup_context=lambda ctx, inputs, output: None)


def gradient():
    x = torch.ones(1, requires_grad=True)
    torch.ops.cells.triple(x).backward()
    return x.grad.item(), triple(x).item()


assert in_ddp(1, lambda: torch.ops.cells.triple(torch.ones(1)).item()) == 3.0
overload = torch.ops.cells.triple.default
assert in_ddp(1, lambda: overload(torch.ones(1)).item()) == 3.0
with Session(2) as session:
    assert session.run(gradient) == session.run(gradient) == (3.0, 3.0)
    assert session.run(lambda: [triple])[0] is triple

# %% a loader whose workers wait for the next epoch
import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=4, num_workers=1, persistent_workers=True)
(first,) = next(iter(loader))
assert in_ddp(1, lambda: sum(int(batch.sum()) for (batch,) in loader)) == 28
assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
del loader

# %% models come back without DistributedDataParallel
import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train():
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "loss": 0.5, "optimizer": optimizer, "compiled": torch.compile(model)}


with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    got = in_ddp(2, train)
assert [str(one.message) for one in said if "DistributedDataParallel" in str(one.message)]
assert type(got["model"]) is nn.Linear and got["loss"] == 0.5 and got["compiled"]._orig_mod is got["model"]
assert got["optimizer"].param_groups[0]["params"][0] is got["model"].weight

# %% parameters that FSDP2 has sharded come back whole
import torch
from torch import nn


def train():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "loss": 0.5}


def alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model


with Session(2, devices="cpu") as session:
    got, other = session.run_all(train)
    again = session.run(train)
expected = alone()
for model in (got["model"], other["model"], again["model"]):
    assert type(model) is nn.Sequential and type(model[0]) is nn.Linear
    assert all(map(torch.allclose, model.parameters(), expected.parameters())), [*model.parameters()]
assert got["loss"] == 0.5 and got["optimizer"].param_groups[0]["params"][0] is got["model"][0].weight
state = got["optimizer"].state[got["model"][0].weight]
assert type(state["exp_avg"]) is torch.Tensor and state["exp_avg"].shape == (4, 4)
got["model"](torch.ones(2, 4)).sum().backward()
got["optimizer"].step()

# %% models that FSDP1 has wrapped come back whole and without it
import warnings

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.last(self.first(x))


def step(model):
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def train(original, nested):
    from torch.distributed.fsdp import FullyShardedDataParallel

    options = {"use_orig_params": original, "device_id": torch.device("cpu")}
    torch.manual_seed(0)
    model = Net()
    if nested:
        model.first = FullyShardedDataParallel(model.first, **options)
    return step(FullyShardedDataParallel(model, **options))  # type: ignore[call-arg]


def keep(*options):
    import __main__

    __main__.kept = train(*options)[0]


def again():
    import __main__

    return __main__.kept, __main__.kept.state_dict()


torch.manual_seed(0)
expected, _ = step(Net())  # type: ignore[call-arg]
with Session(2, devices="cpu") as session:
    for options in ((True, False), (False, False), (True, True), (False, True)):
        with warnings.catch_warnings(record=True) as said:
            model, optimizer = session.run(train, *options)
        assert [one for one in said if "FullyShardedDataParallel" in str(one.message)]
        assert type(model) is Net and type(model.first) is nn.Linear
        assert all(map(torch.allclose, model.parameters(), expected.parameters())), options
        assert optimizer.param_groups[0]["params"][0] is model.first.weight
        assert optimizer.state[model.first.weight]["exp_avg"].shape == (4, 4)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    session.run(keep, True, True)  # a later call of the session has the model, and its state
    model, state = session.run(again)
    assert all(map(torch.allclose, model.parameters(), expected.parameters()))
    assert all(torch.allclose(state[name], value) for name, value in expected.state_dict().items())

# %% a traced module whose tracer needs arguments, as with torch.export
import torch
import torch.fx


class Tracer(torch.fx.Tracer):
    def __init__(self, root):
        super().__init__()


model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU())
traced = torch.fx.GraphModule(model, Tracer(model).trace(model))
ones = torch.ones(1, 2)
assert torch.equal(in_ddp(1, lambda: traced(ones).detach()), traced(ones).detach())
assert torch.equal(in_ddp(1, lambda: traced)(ones), traced(ones))
