"""Evaluation mode for the modules of a function."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """Return the modules that a function is, is a method of, or refers to by its variables."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        values = [function.func, *function.args, *function.keywords.values()]
        return [module for value in values if callable(value) for module in modules_of(value)]
    owner = getattr(function, "__self__", None)
    found = [owner] if isinstance(owner, nn.Module) else []
    function = inspect.unwrap(getattr(function, "__func__", function))
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        for value in [*variables.nonlocals.values(), *variables.globals.values()]:
            if isinstance(value, nn.Module):
                found.append(value)
    return found


@contextlib.contextmanager
def evaluating(function: Callable[..., Any]) -> Iterator[None]:
    """Put the modules of a function into evaluation mode during the block, and restore their modes afterwards."""
    every = [part for module in modules_of(function) for part in module.modules()]
    before = [(part, part.training) for part in every]
    try:
        for part in every:
            part.training = False
        yield
    finally:
        for part, mode in before:
            part.training = mode
