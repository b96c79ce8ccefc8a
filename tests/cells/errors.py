"""Cells and the script of test_errors.py."""


# %% inner
def inner(x):
    y = x + 1
    return y / 0


# %% outer
def outer(x):
    return inner(x)


in_ddp(2, outer, 41)

# %% a module file
import mine


def f():
    return mine.broken()


in_ddp(1, f)


# %% files of modules
import inspect
import json


def files():
    return len(inspect.modulesbyfile)


def forget_files():
    inspect.modulesbyfile.clear()
    inspect._filesbymodname.clear()


def fails():
    try:
        json.loads("")
    except ValueError as error:
        raise KeyError("found nothing") from error


session = Session(1)
session.run(forget_files)  # imports may have looked


# %% except clauses
class Mine(ValueError):
    pass


def f():
    raise Mine("boom")


try:
    in_ddp(2, f)
except ValueError as error:
    assert type(error) is Mine
    print(type(error.__cause__).__name__, "raise Mine" in error.__cause__.text)
    import traceback

    traceback.print_exc(file=sys.stdout)


# %% raised again
def f():
    raise ValueError("boom")


try:
    in_ddp(1, f)
except ValueError as error:
    raise RuntimeError("while training") from error


# %% a death
def f():
    print("my last words")
    os._exit(3)


in_ddp(1, f)

# %% a script
import torch.distributed as dist

from nbdist import in_ddp


def f():
    if dist.get_rank() == 1:
        return {}["missing key"]
    dist.barrier()


if __name__ == "__main__":
    in_ddp(2, f)
