"""`shard` and `replicate` take an optimizer in one form: a name with a learning rate, or what makes one."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import Sessions
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import nn

from nbdist.recsys.models import PooledTables
from nbdist.recsys.parallel.optimizer_choice import described, maker
from nbdist.recsys.sharding import OPTIMIZERS, replicate, shard

FORMS = [
    ({"optimizer": "sgd", "lr": 0.5}, partial(torch.optim.SGD, lr=0.5)),
    ({"optimizer": "adagrad", "lr": 0.5, "eps": 1e-6}, partial(torch.optim.Adagrad, lr=0.5, eps=1e-6)),
    ({"optimizer": "adam", "lr": 0.5, "eps": 1e-6}, partial(torch.optim.Adam, lr=0.5, eps=1e-6)),
]


class Click(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = PooledTables({"user": 8}, embedding_dim=4)
        self.over = nn.Linear(4, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.over(self.tables(batch)).squeeze(1)  # type: ignore[no-any-return]


def trained(how: str, options: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """In a rank: the weights after two steps on all users."""
    if how == "replicate":
        model: Any = replicate(Click(), **options)
    else:
        model = shard(Click(), {"user": "row_wise"}, batch_size=8, **options)
    for _ in range(2):
        model.optimizer.zero_grad()
        model.model({"user": torch.arange(8)}).square().sum().backward()
        model.optimizer.step()
    whole = model.gather()
    return None if whole is None else dict(whole.state_dict())


@pytest.mark.parametrize(("name", "make"), FORMS, ids=["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("how", ["replicate", "shard"])
def test_a_name_and_what_makes_it_train_alike(sessions: Sessions, how: str, name: dict[str, Any], make: Any) -> None:
    dense = {"dense_optimizer": make} if how == "shard" else {}
    named = sessions[2].run(trained, how, name | dense)
    torch.testing.assert_close(sessions[2].run(trained, how, {"optimizer": make}), named, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("how", "options", "message"),
    [
        (
            "replicate",
            {"optimizer": "adamw"},
            "must be a callable or one of sgd, adagrad, adam, got 'adamw'",
        ),
        ("replicate", {"optimizer": torch.optim.SGD, "lr": 0.1}, "`lr` must be left out .* got 0.1: set it there"),
        ("shard", {"optimizer": torch.optim.SGD, "eps": 0.1}, "`eps` must be left out .* got 0.1: set it there"),
        ("shard", {"optimizer": torch.optim.AdamW}, "`optimizer` must make torch's SGD, Adagrad, Adam .* got AdamW"),
        ("shard", {"optimizer": partial(torch.optim.Adam, weight_decay=0.1)}, "but lr and eps .* got weight_decay=0.1"),
    ],
)
def test_optimizers_that_cannot_be_used_are_refused(
    sessions: Sessions, how: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sessions[2].run(trained, how, options)


def test_adam_by_name_is_not_for_sparse_gradients(sessions: Sessions) -> None:
    def ask() -> None:
        replicate(nn.Embedding(4, 2, sparse=True), "adam")

    with pytest.raises(ValueError, match=r"sgd, adagrad or a callable .* as weight has, got 'adam'"):
        sessions[2].run(ask)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fbgemm_knows_the_state_of_each_optimizer(name: str) -> None:
    """TorchRec asks for it when it makes a fused table, and so does each snapshot; FBGEMM has none of LARS-SGD."""
    spec = (4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)
    kernel = SplitTableBatchedEmbeddingBagsCodegen([spec], optimizer=EmbOptimType.EXACT_ADAGRAD)  # all that CPUs have
    kernel.optimizer = EmbOptimType[OPTIMIZERS[name]]
    states = mock.patch.object(type(kernel), "split_optimizer_states", lambda _: [[torch.zeros(4, 4)] * 2])
    with states:
        assert kernel.get_optimizer_state()
        kernel.optimizer = EmbOptimType.LARS_SGD
        with pytest.raises(NotImplementedError):
            kernel.get_optimizer_state()


def test_defaults_are_the_same_in_both_forms() -> None:
    made = maker("adagrad", None, None)([nn.Parameter(torch.zeros(1))])
    assert (made.defaults["lr"], made.defaults["eps"]) == (0.01, 1e-8)
    assert described(maker("adagrad", None, None)) == ("adagrad", 0.01, 1e-8, None)
