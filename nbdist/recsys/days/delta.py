"""The difference of a model's weights from one day to the next: rows of tables, and dense weights.

A tensor is treated as rows. A row that has changed is stored as the exclusive or of its old and new bits. After small
steps, most bits of the result are zeros. The rows of a table of raw ids are identified by their ids. The file has the
first bytes of all numbers, then all second bytes, and so on, compressed by zstd.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from ..io.disk import sync

State = Mapping[str, Any]
"""A `state_dict`: tensors, and for tables of raw ids a dict of tensors."""

_FORMAT, _VERSION = "nbdist.recsys.days.delta", 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their bytes."""


class _Rows(NamedTuple):
    """Rows, each with an id."""

    ids: Tensor
    """Int64, ascending."""
    fields: dict[str, Tensor]
    """Tensors with one row for each id."""


class _Change(NamedTuple):
    """The change of some rows."""

    gone: Tensor
    """Ids of rows that are no longer there."""
    changed: Tensor
    """Ids of rows that are new or different."""
    bits: dict[str, Tensor]
    """The bits of each field in which these rows differ from the rows before; new rows differ from zeros."""


@dataclass(frozen=True)
class Delta:
    """The difference between a model's states of two days. Applied to the first state, it gives the second one, bit for
    bit.

    Examples:
        >>> import torch
        >>> from nbdist.recsys.days import Delta
        >>> yesterday = torch.nn.Embedding(1_000, 8)
        >>> today = torch.nn.Embedding(1_001, 8)  # there is a new user
        >>> with torch.no_grad():
        ...     today.weight[:1_000] = yesterday.weight
        ...     today.weight[7] += 0.01
        >>> delta = Delta.between(yesterday.state_dict(), today.state_dict())
        >>> delta.rows
        {'weight': 2}
        >>> delta.save("delta.zst")
        >>> state = Delta.load("delta.zst").apply(yesterday.state_dict())
        >>> torch.equal(state["weight"], today.weight)
        True
    """

    before: str
    """The digest of the state that the delta applies to."""
    after: str
    """The digest of the state that it makes."""
    _changes: dict[str, _Change]

    @classmethod
    def between(
        cls, before: State, after: State, digest_before: str | None = None, digest_after: str | None = None
    ) -> Delta:
        """Return the difference of two states of one model, both on the CPU. Tables may have grown or shrunk.

        Args:
            before: The earlier `state_dict`.
            after: The later one.
            digest_before: The digest of `before`, if the caller knows it. None: it is computed.
            digest_after: The digest of `after`, in the same way.

        Raises:
            ValueError: The states are of different models.
        """
        old, new = _flat(before), _flat(after)
        if old.keys() != new.keys():
            raise ValueError(f"both states must be of one model, but only one has {min(old.keys() ^ new.keys())}")
        found = {name: _difference(name, old[name], new[name]) for name in new}
        changes = {name: one for name, one in found.items() if len(one.gone) or len(one.changed)}
        return cls(digest_before or digest_of(before), digest_after or digest_of(after), changes)

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows that are new or different, by the name of the weight; others have not changed."""
        return {name: len(change.changed) for name, change in self._changes.items()}

    def apply(self, state: State) -> dict[str, Any]:
        """Return the state of the later day, for `load_state_dict` of a model with as many rows.

        Args:
            state: The `state_dict` of the earlier day, on the CPU. It is not changed.

        Raises:
            ValueError: `state` belongs to another day or to another model.
        """
        if (found := digest_of(state)) != self.before:
            raise ValueError(
                f"`state` must have the digest {self.before}, got {found}: apply the deltas of all days in order"
            )
        rows = {name: _changed(one, self._changes.get(name)) for name, one in _flat(state).items()}
        made = {name: _like(value, name, rows) for name, value in state.items()}
        if digest_of(made) != self.after:
            raise ValueError(f"the delta is damaged: it does not give the state {self.after}")
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the delta to a file, which appears when it is complete."""
        changes = {name: _packed(change) for name, change in self._changes.items()}
        whole = {"format": _FORMAT, "version": _VERSION, "before": self.before, "after": self.after, "changes": changes}
        plain, target = io.BytesIO(), Path(path).expanduser()
        torch.save(whole, plain)
        scratch = target.with_name(f".{target.name}.partial")
        scratch.write_bytes(
            len(plain.getbuffer()).to_bytes(8, "little") + pa.Codec("zstd", 3).compress(plain.getbuffer(), asbytes=True)
        )
        sync(scratch)
        scratch.rename(target)
        sync(target.absolute().parent)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Delta:
        """Read a file of `save`. Runs no code from it.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds no delta.
        """
        file = Path(path).expanduser().read_bytes()
        try:
            plain = pa.Codec("zstd").decompress(file[8:], int.from_bytes(file[:8], "little"), asbytes=True)
            whole = torch.load(io.BytesIO(plain), weights_only=True)
            if whole["format"] != _FORMAT or whole["version"] > _VERSION:
                raise ValueError(f"it is {whole['format']!r}, version {whole['version']}")
            changes = {name: _unpacked(one) for name, one in whole["changes"].items()}
            return cls(whole["before"], whole["after"], changes)
        except Exception as error:  # a damaged file may raise anything
            raise ValueError(f"{path}: not a saved delta: {error}") from error


def tensors_of(state: State) -> list[Tensor]:
    """Return all tensors of a state."""
    found: list[Tensor] = []
    for value in state.values():
        found += [value] if isinstance(value, Tensor) else value.values()
    return found


def digest_of(state: State) -> str:
    """Return a digest of all bits of a state."""
    found = hashlib.blake2b(digest_size=16)
    for name, rows in sorted(_flat(state).items()):
        for field, tensor in [("", rows.ids), *sorted(rows.fields.items())]:
            found.update(f"{name}/{field} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(_bits(tensor).numpy().data)
    return found.hexdigest()


def _flat(state: State) -> dict[str, _Rows]:
    """Return all tensors of a state as rows, by name."""
    found = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            found[name] = _numbered(value)
            continue
        for key, tensor in value.items():
            if not tensor.ndim:
                found[f"{name}/{key}"] = _numbered(tensor)
            elif key.endswith("ids"):  # "ids" and "waiting_ids", and the columns that go with each
                fields = {one: value[one] for one in value if one != key and _id_key(one, value) == key}
                found[f"{name}/{key}"] = _Rows(tensor, {one: field.detach() for one, field in fields.items()})
    return found


def _id_key(key: str, table: Mapping[str, Tensor]) -> str | None:
    """Return the ids that the rows of a tensor belong to, if the tensor is a part of a table of raw ids; None for a
    single number.
    """
    if not table[key].ndim:
        return None
    return "waiting_ids" if key.startswith("waiting_") else "ids"


def _numbered(tensor: Tensor) -> _Rows:
    rows = tensor.detach() if tensor.ndim else tensor.detach().reshape(1)
    return _Rows(torch.arange(len(rows)), {"": rows})


def _like(value: Any, name: str, rows: Mapping[str, _Rows]) -> Any:
    """Rebuild a value of a state from its rows, in the form of `value`."""
    if isinstance(value, Tensor):
        made = rows[name].fields[""]
        return made if value.ndim else made.reshape(())
    found = {}
    for key, tensor in value.items():
        of = _id_key(key, value)
        if of is None:
            found[key] = rows[f"{name}/{key}"].fields[""].reshape(())
        else:
            found[key] = rows[f"{name}/{of}"].ids if key == of else rows[f"{name}/{of}"].fields[key]
        assert found[key].dtype == tensor.dtype
    return found


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, shape (rows, numbers of a row)."""
    bits = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous().view(_BITS[tensor.itemsize])
    return bits.reshape(len(bits), tensor.shape[1:].numel())


def _values(bits: Tensor, like: Tensor) -> Tensor:
    """Rebuild a tensor from such integers, with the type and width of another tensor."""
    shape = (len(bits), *like.shape[1:])
    return bits.bool().reshape(shape) if like.dtype == torch.bool else bits.reshape(shape).view(like.dtype)


def _aligned(rows: _Rows, ids: Tensor) -> dict[str, Tensor]:
    """Return the bits of each field for `ids`, in ascending order; zeros where there is no such row."""
    bits = {name: _bits(field) for name, field in rows.fields.items()}
    if torch.equal(rows.ids, ids):
        return bits
    there = torch.isin(ids, rows.ids, assume_unique=True)
    places = torch.searchsorted(rows.ids, ids[there])
    found = {name: field.new_zeros(len(ids), field.shape[1]) for name, field in bits.items()}
    for name, field in bits.items():
        found[name][there] = field[places]
    return found


def _difference(name: str, before: _Rows, after: _Rows) -> _Change:
    for field, new in after.fields.items():
        old = before.fields[field]
        if old.dtype != new.dtype or old.shape[1:] != new.shape[1:]:
            raise ValueError(
                f"both states must be of one model, but {name} is {old.dtype} of shape {tuple(old.shape)} in the "
                f"first and {new.dtype} of shape {tuple(new.shape)} in the second"
            )
    old_bits, new_bits = _aligned(before, after.ids), {key: _bits(one) for key, one in after.fields.items()}
    differ = ~torch.isin(after.ids, before.ids, assume_unique=True)
    for key, bits in new_bits.items():
        differ |= (bits != old_bits[key]).any(1)
    places = differ.nonzero()[:, 0]
    gone = before.ids[~torch.isin(before.ids, after.ids, assume_unique=True)]
    return _Change(
        gone, after.ids[places], {key: bits[places] ^ old_bits[key][places] for key, bits in new_bits.items()}
    )


def _changed(before: _Rows, change: _Change | None) -> _Rows:
    if change is None:
        return before
    stay = before.ids[~torch.isin(before.ids, change.gone, assume_unique=True)]
    new = change.changed[~torch.isin(change.changed, before.ids, assume_unique=True)]
    ids = torch.cat([stay, new]).sort().values
    places = torch.searchsorted(ids, change.changed)
    fields = {}
    for key, bits in _aligned(before, ids).items():
        made = bits.clone()
        made[places] ^= change.bits[key]
        fields[key] = _values(made, before.fields[key])
    return _Rows(ids, fields)


def _packed(change: _Change) -> dict[str, Any]:
    """Return a change in the form in which the file stores it."""
    ids = {
        name: _planes(one.diff(prepend=one.new_zeros(1))) for name, one in change._asdict().items() if name != "bits"
    }
    return ids | {"bits": {key: (*bits.shape, _planes(bits)) for key, bits in change.bits.items()}}


def _unpacked(packed: Mapping[str, Any]) -> _Change:
    gone, changed = (_integers(packed[name]).cumsum(0) for name in ("gone", "changed"))
    bits = {key: _integers(planes).reshape(rows, width) for key, (rows, width, planes) in packed["bits"].items()}
    return _Change(gone, changed, bits)


def _planes(integers: Tensor) -> Tensor:
    """Split integers into bytes, shape (bytes of an integer, number of integers)."""
    return integers.contiguous().reshape(-1, 1).view(torch.uint8).T.contiguous()


def _integers(planes: Tensor) -> Tensor:
    return planes.T.contiguous().view(_BITS[len(planes)])[:, 0]
