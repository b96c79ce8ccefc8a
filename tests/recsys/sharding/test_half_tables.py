"""Tables of half precision take the steps of single precision, and other types are refused before a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Sessions
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

from nbdist.recsys.sharding import Sharded, replicate, shard
from nbdist.recsys.versions import lacks_sequences

pytestmark = pytest.mark.slow

WARM = "import torchrec.distributed"
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def build(data_type: DataType, names: str, pooled: bool, optimizer: str, fused: bool | None, how: str) -> Sharded:
    torch.manual_seed(0)
    kind, config = (EmbeddingBagCollection, EmbeddingBagConfig) if pooled else (EmbeddingCollection, EmbeddingConfig)
    tables = [
        config(name=name, num_embeddings=8, embedding_dim=8, feature_names=[name], data_type=data_type)
        for name in names
    ]
    model = kind(tables=tables)
    for table in (model.embedding_bags if pooled else model.embeddings).values():
        nn.init.constant_(table.weight, 0.125)  # both types have it
    rate = 1e2 if optimizer == "sgd" else 0.01
    return shard(model, {"*": how}, batch_size=1, optimizer=optimizer, lr=rate, fused=fused)


def step(model: Sharded, names: str, pooled: bool) -> None:
    count = len(names)
    features = KeyedJaggedTensor(list(names), torch.tensor([3] * count), lengths=torch.tensor([1] * count))
    model.optimizer.zero_grad()
    output = model.model(features)
    output = output.values() if pooled else torch.cat([output[name].values() for name in names])
    assert output.dtype == torch.float32
    (output.sum() * 1e-4).backward()
    model.optimizer.step()


def weights(model: Sharded, pooled: bool) -> Any:
    whole = model.gather()
    return None if whole is None else {name: one.float() for name, one in whole.state_dict().items()}


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("names", ["xy", "x"])  # of a single table, a rank holds none
def test_steps_are_those_of_single_precision(sessions: Sessions, names: str, pooled: bool) -> None:
    def moved() -> dict[str, tuple[Any, Any]]:
        found = {}
        parts = () if not pooled and lacks_sequences() else ("table_wise", "row_wise")
        for how in (*parts, "data_parallel"):
            for optimizer in OPTIMIZERS:
                for fused in (None, False):
                    if (how, optimizer) == ("data_parallel", "adam"):
                        continue
                    both = []
                    for data_type in (DataType.FP32, DataType.FP16):
                        model = build(data_type, names, pooled, optimizer, fused, how)
                        for _ in range(3):
                            step(model, names, pooled)
                        both.append(weights(model, pooled))
                    found[f"{how} {optimizer} {fused}"] = (both[0], both[1])
        return found

    for case, (single, half) in sessions[2].run(moved).items():
        for name, values in single.items():
            torch.testing.assert_close(half[name], values, atol=1e-3, rtol=0, msg=f"{case}: {name}")
            assert (values - 0.125).abs().max() > 0.005, case


def test_state_of_copies_is_saved_in_single_precision(sessions: Sessions, tmp_path: Path) -> None:
    options = DataType.FP16, "x", True, "adagrad", None, "data_parallel"

    def go_on() -> tuple[bool, float]:
        first, second = build(*options), build(*options)
        for _ in range(2):
            step(first, "x", True)
        first.save(tmp_path / "saved")
        second.load(tmp_path / "saved")
        step(first, "x", True)
        step(second, "x", True)
        ((_, names),) = [(one._optimizer.state, one.params) for one in second.optimizer.of_copies]
        ((state,),) = [[one._optimizer.state[p] for p in names.values()] for one in second.optimizer.of_copies]
        same = all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
        assert state["sum"].dtype == torch.float32
        return same, float(state["sum"].max())

    for same, total in sessions[2].run_all(go_on):
        assert same and total == pytest.approx(3e-8, rel=0.01)


def test_rates_of_copies_are_those_of_their_groups(sessions: Sessions) -> None:
    def run() -> float:
        model = build(DataType.FP16, "x", True, "adagrad", None, "data_parallel")
        for group in model.optimizer.param_groups:
            group["lr"] = 0.05
        step(model, "x", True)
        found = weights(model, True)
        return 0.0 if found is None else float((found["embedding_bags.x.weight"] - 0.125).abs().max())

    assert sessions[2].run(run) == pytest.approx(0.05, abs=1e-3)


def test_unsupported_data_types_are_refused(sessions: Sessions) -> None:
    def run() -> list[str]:
        said = []
        for data_type, how, fused in (
            (DataType.BF16, "table_wise", None),
            (DataType.BF16, "data_parallel", None),
            (DataType.BF16, "table_wise", False),
            (DataType.INT8, "table_wise", None),
        ):
            with pytest.raises(ValueError) as caught:
                config = EmbeddingBagConfig(
                    name="x", num_embeddings=8, embedding_dim=8, feature_names=["x"], data_type=data_type
                )
                device = torch.device("meta")
                model = EmbeddingBagCollection(tables=[config], device=device)
                shard(model, {"*": how}, batch_size=1, fused=fused)
            said.append(str(caught.value))
        return said

    for text in sessions[2].run(run):
        assert "`data_type` of table 'x' must be FP32 or FP16, got " in text


def test_an_eps_that_is_0_in_the_type_of_a_parameter(sessions: Sessions) -> None:
    def run() -> None:
        for optimizer in ("adagrad", "adam", lambda parameters: torch.optim.AdamW(parameters, lr=0.1)):
            with pytest.raises(ValueError, match=r"`eps` of Ada\w+ must not be 0 in torch.float16"):
                replicate(nn.Linear(2, 2).half(), optimizer)
        replicate(nn.Linear(2, 2).half(), "sgd")
        replicate(nn.Linear(2, 2).bfloat16(), "adam")

    sessions[2].run_all(run)
