"""Cells of test_arrival.py in which something is refused."""

# %% columns of objects in polars frames
import polars as pl


class Thing:
    def __init__(self, x):
        self.x = x


things = [Thing(1), None, Thing(3)]
frame = pl.DataFrame({"n": [1, 2, 3], "thing": pl.Series("thing", things, dtype=pl.Object)})


def fn(frame, series):
    assert frame.schema == {"n": pl.Int64, "thing": pl.Object}
    assert [t and t.x for t in frame["thing"]] == [1, None, 3] == [t and t.x for t in series]
    return frame, series, pl.DataFrame({"o": pl.Series([{1}, [2]], dtype=pl.Object)})


back, series, made = in_ddp(1, fn, frame, frame["thing"])
assert back.schema == frame.schema and [type(t) for t in back["thing"]] == [Thing, type(None), Thing]
assert series.name == "thing" and series.dtype == pl.Object and list(made["o"]) == [{1}, [2]]
frame = pl.DataFrame({"ok": [1], "stuck": pl.Series([(i for i in ())], dtype=pl.Object)})
try:
    in_ddp(1, lambda: frame)
except CaptureError as exc:
    assert str(exc).startswith("frame['stuck'][0] cannot be sent"), exc
else:
    raise AssertionError("sent")

# %% a module whose file is gone
import pathlib
import sys

pathlib.Path("short_lived.py").write_text("def number(): return 1\n")
sys.path.insert(0, "")
import short_lived

pathlib.Path("short_lived.py").unlink()
try:
    in_ddp(1, lambda: short_lived.number())
except CaptureError as exc:
    assert "No module named 'short_lived'" in str(exc) and "a module that cannot be imported there" in str(exc), exc
else:
    raise AssertionError("imported")
finally:
    sys.path.remove("")
    del sys.modules["short_lived"]

# %% what cannot be read in a rank
import os

HERE = os.getpid()


class Local:
    def __reduce__(self):
        return rebuild, (HERE,)


def rebuild(pid):
    if pid != os.getpid():
        raise RuntimeError("only at home")
    return Local()


local = {"a": [Local()]}
good = {"b": 1}
for call, name in [
    (lambda: in_ddp(1, lambda: (good, local)), "local"),
    (lambda: in_ddp(1, lambda x, y: y, 1, Local()), "argument 2"),
    (lambda: in_ddp(1, lambda x, y: y, 1, y=Local()), "argument y"),
    (lambda: in_ddp(1, lambda: Local(), need={"given": Local()}), "given"),
]:
    try:
        call()
    except CaptureError as exc:
        assert str(exc).startswith(f"{name} cannot be read in rank 0"), exc
        assert "RuntimeError: only at home" in str(exc)
    else:
        raise AssertionError("read")


class Back:
    def __reduce__(self):
        return back, (os.getpid(),)


def back(pid):
    if pid != os.getpid():
        raise RuntimeError("only there")
    return Back()


try:
    in_ddp(1, lambda: [Back()])
except CaptureError as exc:
    assert "the value that the function returned cannot be read" in str(exc), exc
    assert "RuntimeError: only there" in str(exc)
else:
    raise AssertionError("read")


# %% a value that was shown and is not asked for by its number
def fn(n):
    try:
        return Out[n]
    except KeyError as exc:
        return str(exc)


assert "need=" in in_ddp(1, fn, number), in_ddp(1, fn, number)
assert in_ddp(1, fn, number, need={"Out": {number: "given"}}) == "given"
