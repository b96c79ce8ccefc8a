"""Arguments with one value for each rank (`per_rank`), and arguments of several calls in one (`Spread`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from ..checks import shown
from ..wire.messages import PerRank
from .foreign import is_a, name_of


class OnePerRank:
    """A list with one item for each rank: see `per_rank`."""

    def __init__(self, values: Iterable[Any]) -> None:
        if not isinstance(values, Iterable):
            raise TypeError(f"values must be a list with one value for each rank, got {shown(values)}")
        self.values = list(values)

    def __repr__(self) -> str:
        return f"per_rank({self.values!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "per_rank(...) must be an argument of the function itself, not a part of an argument or a variable"
        )


class Spread:
    """A function that calls another one with the items of a tuple.

    Args:
        fn: The function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.__wrapped__ = fn
        self.__name__ = name_of(fn)

    def __call__(self, items: tuple[Any, ...]) -> Any:
        """Return the value of the function for these arguments."""
        return self.__wrapped__(*items)


def per_rank(values: Iterable[Any]) -> Any:
    """Mark an argument as one value for each rank: the first item for the first rank, and so on.

    Args:
        values: One value for each rank that runs the function. All values travel to each rank, which opens its
            own: big arrays are shared, and not copied.

    Raises:
        ValueError: Raised by the call if the number of items is not the number of ranks.

    Examples:
        >>> in_ddp(2, max, per_rank([3, 5]), 4)
        4
        >>> from nbdist import Session
        >>> with Session(2) as session:
        ...     session.run_all(max, per_rank([3, 5]), 4)
        [4, 5]
    """
    return OnePerRank(values)


def for_each_rank(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int, fixed: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for `count` ranks, with `PerRank` in place of each argument that `per_rank` marks.

    Raises `ValueError` for more or fewer items, and for any marked argument if the number of ranks is not `fixed`.
    """

    def given(name: str, value: Any) -> Any:
        if not is_a(value, OnePerRank):
            return value
        if len(value.values) != count:
            raise ValueError(f"{name}: per_rank() must have an item for each of {count} ranks, got {len(value.values)}")
        if not fixed:
            raise ValueError(
                f"{name}: per_rank() has an item for each of {count} ranks, and a restart may leave fewer "
                f"(min_ranks=): choose by the rank, in the function, or name ranks that have to be there (ranks=)"
            )
        return PerRank(value.values)

    positional = tuple(given(f"argument {number}", value) for number, value in enumerate(args, 1))
    return positional, {name: given(f"argument {name}", value) for name, value in kwargs.items()}


def all_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the whole lists in place of the arguments that `per_rank` marks."""

    def whole(value: Any) -> Any:
        return value.values if is_a(value, OnePerRank) else value

    return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}


def own(value: Any, place: int) -> Any:
    """Return an argument's value for the rank at this place among the ranks of the call."""
    return value.values[place] if is_a(value, PerRank) else value
