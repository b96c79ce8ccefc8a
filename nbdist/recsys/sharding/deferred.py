"""Tables that are updated in the optimizer's step; fused tables are updated in the backward pass.

Gradients that are clipped, or accumulated over several batches, must be known before a table changes; and FBGEMM has no
fused Adam on CPUs, and nowhere SGD with momentum. Weights and state stay where FBGEMM keeps them, so that checkpoints
are equal. torch does the look-ups and the updates, only for the rows that were looked up, and more slowly than FBGEMM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    construct_split_state,
)
from torch import Tensor, nn
from torchrec.distributed import batched_embedding_kernel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

ADAM, ADAGRAD = EmbOptimType.ADAM, EmbOptimType.EXACT_ADAGRAD


class LookedUp(NamedTuple):
    """The rows of a table that a forward pass has looked up."""

    table: int
    rows: Tensor
    """The rows, shape (rows,), distinct."""
    vectors: Tensor
    """The vectors, shape (rows, columns): a leaf, which gets the gradient."""


def counters(kernel: Any) -> list[Tensor]:
    """Return FBGEMM's counters of a kernel's steps. From version 1.1 on, there is a second counter, which stays on the
    CPU."""
    return [kernel.iter, *([kernel.iter_cpu] if hasattr(kernel, "iter_cpu") else [])]


class DeferredTables(SplitTableBatchedEmbeddingBagsCodegen):
    """The FBGEMM tables of one rank, updated by `update` and not in the backward pass."""

    def __init__(
        self, *args: Any, optimizer: EmbOptimType, momentum: float = 0.0, nesterov: bool = False, **options: Any
    ) -> None:
        on_cpu = options["device"].type == "cpu"
        # On CPUs, FBGEMM refuses to make what Adam keeps: its first moment has the shape of Adagrad's state.
        super().__init__(*args, optimizer=ADAGRAD if on_cpu and optimizer == ADAM else optimizer, **options)
        if on_cpu and optimizer == ADAM:
            self.optimizer = ADAM
            second = construct_split_state(self.embedding_specs, rowwise=False, cacheable=False)
            self._apply_split(second, prefix="momentum2", dtype=torch.float32)
        self.momentum, self.nesterov = momentum, nesterov
        """The momentum of SGD, whose velocities take the place of Adagrad's state. 0.0: it is no SGD with momentum."""
        self.looked_up: list[LookedUp] = []

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Look up rows: pooled, shape (samples, columns of all features); otherwise (ids of all features, columns)."""
        features = self.feature_table_map
        samples = (len(offsets) - 1) // len(features)
        offsets = offsets.long()  # as `unique` numbers the ids
        ends = offsets[::samples].tolist() if samples else [0] * (len(features) + 1)
        found = []
        for table, weight in enumerate(self.split_embedding_weights()):
            first, count = features.index(table), features.count(table)  # its features are side by side
            ids = slice(ends[first], ends[first + count])
            rows, place = indices[ids].unique(return_inverse=True)
            # In single precision, and so gradients are, also of tables of half precision.
            vectors = weight[rows].float().requires_grad_(torch.is_grad_enabled())
            if vectors.requires_grad:
                self.looked_up.append(LookedUp(table, rows, vectors))
            if self.pooling_mode == PoolingMode.NONE:
                found.append(nn.functional.embedding(place, vectors))
                continue
            pooled = nn.functional.embedding_bag(
                place,
                vectors,
                offsets[first * samples : (first + count) * samples + 1] - ends[first],
                mode="mean" if self.pooling_mode == PoolingMode.MEAN else "sum",
                per_sample_weights=None if per_sample_weights is None else per_sample_weights[ids],
                include_last_offset=True,
            )
            found.append(pooled.view(count, samples, -1).transpose(0, 1).flatten(1))  # (samples, count * columns)
        output = torch.cat(found, dim=0 if self.pooling_mode == PoolingMode.NONE else 1)
        return output.to(SparseType.from_int(self.output_dtype).as_dtype())

    def gradients(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Return the sums of gradients since the last `forget`, for each table that has any: its number, rows,
        gradients."""
        tables: dict[int, list[LookedUp]] = {}
        for one in self.looked_up:
            if one.vectors.grad is not None:
                tables.setdefault(one.table, []).append(one)
        for table, several in tables.items():
            gradients = [one.vectors.grad for one in several]
            if len(several) == 1:
                yield table, several[0].rows, gradients[0]  # type: ignore[misc]
                continue
            rows, place = torch.cat([one.rows for one in several]).unique(return_inverse=True)
            both = torch.cat(gradients)  # type: ignore[arg-type]
            yield table, rows, both.new_zeros(len(rows), both.shape[1]).index_add_(0, place, both)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients by a factor."""
        for one in self.looked_up:
            if one.vectors.grad is not None:
                one.vectors.grad *= factor

    def forget(self) -> None:
        """Drop the gradients."""
        self.looked_up.clear()

    @torch.no_grad()
    def update(self) -> None:
        """Update rows by their gradients as FBGEMM's kernels do. Rows without a gradient do not change."""
        for counter in counters(self):
            counter += 1
        weights, states = self.split_embedding_weights(), self.split_optimizer_states()
        args, step = self.optimizer_args, int(counters(self)[-1])
        # FBGEMM 1.0 keeps the rate among the arguments.
        rate = float(self.learning_rate_tensor if hasattr(self, "learning_rate_tensor") else args.learning_rate)
        for table, rows, gradient in self.gradients():
            weight = weights[table]
            if self.optimizer == EmbOptimType.EXACT_SGD:
                change = rate * gradient
            elif self.momentum:
                (velocity,) = states[table]
                velocity[rows] = moved = self.momentum * velocity[rows] + gradient
                change = rate * (gradient + self.momentum * moved if self.nesterov else moved)
            elif self.optimizer == ADAM:
                first, second = states[table]
                mean = args.beta1 * first[rows] + (1 - args.beta1) * gradient
                square = args.beta2 * second[rows] + (1 - args.beta2) * gradient**2
                first[rows], second[rows] = mean, square
                scale = (square / (1 - args.beta2**step)).sqrt() + args.eps
                change = rate / (1 - args.beta1**step) * mean / scale
            else:
                (total,) = states[table]
                rowwise = total.ndim == 1
                total[rows] += (gradient**2).mean(1) if rowwise else gradient**2
                scale = total[rows].sqrt() + args.eps
                change = rate * gradient / (scale[:, None] if rowwise else scale)
            weight[rows] = (weight[rows].float() - change).to(weight.dtype)


class TablesOptimizer(CombinedOptimizer):
    """The optimizers of a sharded model, which also update the deferred tables.

    Args:
        optimizers: TorchRec's optimizers of the fused tables, which pass learning rates on, and the optimizers of all
            other parameters.
        waiting: The deferred tables of this rank.
    """

    def __init__(self, optimizers: list[Any], waiting: list[DeferredTables]) -> None:
        super().__init__(optimizers)
        self.waiting = waiting
        copies = [isinstance(one, KeyedOptimizerWrapper) for one in optimizers]
        self.of_copies = [one for one, copied in zip(optimizers, copies, strict=True) if copied]
        """The optimizers of parameters that every rank has a copy of."""
        self.of_tables = [one for one, copied in zip(optimizers, copies, strict=True) if not copied]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for tables in self.waiting:
            tables.forget()

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for tables in self.waiting:
            tables.update()


@contextlib.contextmanager
def deferring(fused: set[EmbOptimType]) -> Iterator[None]:
    """Make TorchRec, while it shards a model, use deferred tables for optimizers that are not among `fused`."""

    def make(*args: Any, optimizer: EmbOptimType, **options: Any) -> SplitTableBatchedEmbeddingBagsCodegen:
        kind = SplitTableBatchedEmbeddingBagsCodegen if optimizer in fused else DeferredTables
        return kind(*args, optimizer=optimizer, **options)

    # TorchRec takes no kernel of one's own: see `create_embedding_kernel` there.
    with mock.patch.object(batched_embedding_kernel, SplitTableBatchedEmbeddingBagsCodegen.__name__, make):
        yield
