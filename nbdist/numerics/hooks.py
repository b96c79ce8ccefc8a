"""Hooks of torch and fastai that report calls of models and steps of optimizers to the checks of a call."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..system.after_import import AfterImport


class Models:
    """The models of a call: modules in training that no other module calls."""

    def __init__(self) -> None:
        self.all: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        """The models are in the order of their first calls, which is the same on all ranks."""
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def is_new(self, module: nn.Module) -> bool:
        """Return whether a model is called for the first time. Modules inside it no longer count as models."""
        if module in self.all:
            return False
        inner = [one for one in module.modules() if one is not module]
        self._inner.update(inner)
        for one in inner:
            self.all.pop(one, None)
        self.all[module] = None
        return True

    def is_inner(self, module: nn.Module) -> bool:
        """Return whether a module is part of a model."""
        return module in self._inner


class AfterForward:
    """Call `action(module, args, kwargs, output)` after forward passes, until the stack closes.

    The hook begins with all modules and later follows some modules only, because torch calls every module more slowly
    while a hook of all modules exists.
    """

    def __init__(self, stack: contextlib.ExitStack, action: Callable[[nn.Module, Any, Any, Any], None]) -> None:
        self._hook = _Hook(action)
        self._handles: list[Any] = []
        self.everywhere = False
        """True: the action is called for all modules."""
        self.of_all()
        stack.callback(self._remove)

    def of_all(self) -> None:
        """Hook all modules from now on."""
        self._remove()
        self._handles = [register_module_forward_hook(self._hook, with_kwargs=True)]
        self.everywhere = True

    def only_of(self, models: Iterable[nn.Module]) -> None:
        """Hook only these modules from now on."""
        self._remove()
        self._handles = [one.register_forward_hook(self._hook, with_kwargs=True) for one in models]
        self.everywhere = False

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Hook:
    """A hook that is not copied with its module."""

    def __init__(self, action: Callable[[nn.Module, Any, Any, Any], None]) -> None:
        self._action = action

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._action(module, args, kwargs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def around_steps(
    stack: contextlib.ExitStack, before: Callable[[Any, Any, Any], Any], after: Callable[..., None]
) -> None:
    """Call `before(optimizer, args, kwargs)` and `after(optimizer, ...)` around steps, until the stack closes.

    `before` may return replacements for the arguments, the optimizer first. If a step calls the step of its base class,
    both functions are called for each of the two steps.
    """
    stack.callback(register_optimizer_step_pre_hook(before).remove)
    stack.callback(register_optimizer_step_post_hook(after).remove)

    def watch(module: types.ModuleType) -> None:
        replace(stack, module.Learner, "_step", functools.partial(_fastai_step, before, after))

    finder = AfterImport({"fastai.learner": watch})
    sys.meta_path.insert(0, finder)
    stack.callback(sys.meta_path.remove, finder)


def _fastai_step(before: Any, after: Any, original: Any) -> Any:
    """Call both functions around `Learner._step` for fastai's own optimizers; torch's optimizers have hooks for
    this."""

    def _step(learner: Any) -> Any:
        optimizer = learner.opt
        own = hasattr(optimizer, "param_lists") and not hasattr(optimizer, "opt")
        if own:
            before(optimizer, (optimizer,), {})
        result = original(learner)
        if own:
            after(optimizer)
        return result

    return _step


def replace(stack: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by `make(old value)` until the stack closes."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))
    stack.callback(setattr, owner, name, original)


def parameters_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of an optimizer of torch or fastai."""
    if hasattr(optimizer, "param_groups"):
        return [one for group in optimizer.param_groups for one in group["params"]]
    return [one for group in optimizer.param_lists for one in group]


def gradients_of(optimizer: Any) -> list[Tensor]:
    """Return the gradients of the parameters of an optimizer of torch or fastai."""
    if hasattr(optimizer, "param_groups"):  # in one pass: this runs in each step
        return [found for group in optimizer.param_groups for one in group["params"] if (found := one.grad) is not None]
    return [found for one in parameters_of(optimizer) if (found := one.grad) is not None]


def in_training() -> bool:
    """Return whether plain Python code is running that builds an autograd graph."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def is_running(frame: types.FrameType) -> bool:
    """Return whether a frame is among those that have called this function."""
    outer: types.FrameType | None = sys._getframe(1)
    while outer is not None and outer is not frame:
        outer = outer.f_back
    return outer is not None
