"""Functions that take Python's own functions away in a rank: the value and the error come back, and it stays so."""

from __future__ import annotations

import builtins
import os

import pytest
import torch

from nbdist import Session, parallel_map

MODULES = (builtins, os)


def take_all_away(delete: bool = False) -> torch.Tensor:
    value = torch.ones(10_000_000)  # its size is compared with the free memory, which is in files
    taken = [(vars(module), name) for module in MODULES for name, own in vars(module).items() if callable(own)]
    for names, name in taken:
        if delete:
            del names[name]
        else:
            names[name] = None
    return value


def fail() -> None:
    error = KeyError("in vain")
    take_all_away()
    raise error


@pytest.mark.parametrize("delete", [False, True])
def test_the_value_comes_back(delete: bool) -> None:
    with Session(1) as session:
        assert session.run(take_all_away, delete).sum() == 10_000_000
        with pytest.raises((TypeError, NameError), match=r"NoneType|len"):
            session.run(lambda: len([]))
        assert session.run(lambda: 5) == 5


def test_the_error_comes_back_with_its_lines() -> None:
    with Session(1) as session, pytest.raises(KeyError, match="in vain") as caught:
        session.run(fail)
    assert "raise error" in str(caught.value.__cause__)


def test_what_a_function_puts_there_stays_if_it_can_be_called() -> None:
    def replace() -> None:
        own = builtins.print
        builtins.print = lambda *values, force=False: own(*values) if force else None  # as torchvision's scripts do
        os.kill = None

    with Session(1) as session:
        session.run(replace)
        session.run(lambda: print("seen", force=True))
        assert session.run(lambda: os.kill) is None
        assert "seen" in session.logs(0)


def test_a_worker_of_parallel_map() -> None:
    def take(item: int) -> torch.Tensor:
        builtins.open = None
        return torch.ones(10_000_000)

    assert [value.sum() for value in parallel_map(take, range(2), 1, progress=False)] == [10_000_000] * 2
