"""Tests of users, which test_pytest_users.py writes to files of these names."""

# %% test_mine.py
import pytest
import torch
import torch.distributed as dist

from nbdist import Session, in_ddp

NUMBER = 2.0


class Broken(Exception):
    pass


def all_reduce_of_ones():
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def check(number):
    assert number == NUMBER, "not the number"
    return number


def broken():
    raise Broken("on purpose")


def test_a_function_of_the_module():
    assert in_ddp(2, all_reduce_of_ones) == 2.0


def test_a_function_of_the_test():
    factor = 3

    def nested():
        return all_reduce_of_ones() * factor

    assert in_ddp(2, nested) == 6.0
    assert in_ddp(2, lambda: check(all_reduce_of_ones())) == 2.0


def test_a_failing_assert():
    with pytest.raises(AssertionError, match="not the number"):
        in_ddp(2, check, 3.0)

    def nested():
        got = [1, 2]
        assert got == [1, 3]

    with pytest.raises(AssertionError) as caught:
        in_ddp(2, nested)
    assert "[1, 2] == [1, 3]" in str(caught.value)


def test_an_exception_of_the_module():
    with pytest.raises(Broken, match="on purpose"):
        in_ddp(2, broken)


@pytest.fixture(scope="module")
def session():
    with Session(2) as session:
        yield session


@pytest.mark.parametrize("number", [2.0, 3.0])
def test_a_shared_session(session, number):
    assert session.run_all(lambda: all_reduce_of_ones() + number) == [2.0 + number] * 2


# %% tests/unit/test_mine.py
from nbdist import in_ddp
from tests import conftest

from ..helpers import double


def fn():
    return double(conftest.FACTOR)


class TestClass:
    def method(self, x):
        return double(x)

    def test(self):
        assert in_ddp(2, fn) == 10 and in_ddp(1, self.method, 4) == 8


# %% test_failing.py
from nbdist import in_ddp


def fn(rows):
    assert len(rows) == 3, "rows are missing"  # in the rank


def test_that_fails():
    in_ddp(2, fn, [1, 2])
