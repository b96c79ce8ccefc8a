"""What a call takes along: imports=, need=, and everything that the function uses without being told."""

from __future__ import annotations

import glob
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Cell
from hypothesis import given
from hypothesis import strategies as st

from nbdist import CaptureError, in_ddp
from nbdist.capture.call import capture_call
from nbdist.capture.imports import modules_named, names_given, parse_imports, run_imports
from nbdist.capture.need import resolve_need
from nbdist.wire.cache import SentCache

# ------------------------------------------------------------------------------------------------------ imports=

IMPORTS: list[tuple[str | list[str], set[str]]] = [
    ("import os", {"os"}),
    ("import os, sys as system", {"os", "system"}),
    ("import xml.dom.minidom", {"xml"}),
    ("import xml.dom.minidom as dom", {"dom"}),
    ("from os import path", {"path"}),
    ("from os import (path,  # where\n    sep as separator,\n)", {"path", "separator"}),
    ("from os import \\\n    path", {"path"}),
    ("from string import *", {"ascii_letters", "Template"}),
    ("import os; import sys", {"os", "sys"}),
    ("# nothing yet", set()),
    ("", set()),
    ("\n    import os\n\n    # and\n    from os import path  # this\n", {"os", "path"}),
    (["import os", "    from os import path", "from os import (\n    sep,\n)"], {"os", "path", "sep"}),
]


@pytest.mark.parametrize(("block", "names"), IMPORTS)
def test_all_of_the_import_syntax(block: str | list[str], names: set[str]) -> None:
    parsed = parse_imports(block)
    namespace: dict[str, Any] = {}
    assert run_imports(parsed, namespace) >= names
    assert names_given(parsed) == set(namespace)


MODULES = "os os.path sys math json collections collections.abc xml.dom.minidom string".split()
STATEMENTS = st.one_of(
    st.builds("import {}".format, st.sampled_from(MODULES)),
    st.builds("import {} as {}".format, st.sampled_from(MODULES), st.sampled_from("abc")),
    st.builds("from os import path as {}{}".format, st.sampled_from("abc"), st.sampled_from(["", "  # why"])),
    st.builds("from os import (\n  sep,{}\n  path{}\n)".format, st.sampled_from(["", "# why"]), st.sampled_from(",#")),
    st.builds("from {} import *".format, st.sampled_from(MODULES)),
)


@given(st.lists(STATEMENTS), st.sampled_from(["", "  ", "\t"]), st.sampled_from(["\n", "\n\n", "\n# so\n"]))
def test_names_given_are_the_names_that_running_gives(lines: list[str], indent: str, between: str) -> None:
    block = "".join(indent + line + "\n" for line in between.join(lines).splitlines())
    assert names_given(parse_imports(block)) == run_imports(parse_imports(block), {})
    assert names_given(parse_imports(lines)) == run_imports(parse_imports(lines), {})


@given(st.text() | st.text(alphabet="import from*()\n;,. #\\'\"=x"))
def test_any_text_is_imports_or_a_value_error(text: str) -> None:
    try:
        block = parse_imports(text)
    except ValueError:
        return
    assert modules_named(block) or not re.sub(r"#.*|\\|[\s;]", "", block)


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ("x = 1", "x = 1"),
        ("import os\nos.getcwd()", "os.getcwd()"),
        ("import os; print(os)", "import os; print(os)"),
        ("import os\n\ndef f():\n    import sys", "def f():"),
        ("try:\n    import os\nexcept ImportError:\n    pass", "try:"),
        ("if True: import os", "if True: import os"),
        ("'just text'", "'just text'"),
        ("imprt os", "imprt os"),
        ("import os\nfrom os import", "from os import"),
        ("import os\n  import sys", "import sys"),
        ("from . import x", "from . import x"),
        (["import os", "print(1)"], "print(1)"),
    ],
)
def test_anything_but_imports_is_an_error_that_shows_the_line(block: str | list[str], line: str) -> None:
    with pytest.raises(ValueError, match=f"imports=.*line.*{re.escape(line)}"):
        parse_imports(block)


@pytest.mark.parametrize("block", [3, [3], None, b"import os"])
def test_imports_of_another_type(block: Any) -> None:
    with pytest.raises(TypeError, match="imports="):
        parse_imports(block)


def test_a_star_gives_what_the_module_makes_public() -> None:
    assert {"glob", "iglob"} <= names_given("from glob import *") <= set(glob.__all__)
    assert "deque" in names_given("from collections import *") and "_chain" not in names_given(
        "from collections import *"
    )
    assert names_given("from not_yet_loaded import *") == set()


# --------------------------------------------------------------------------------------------------------- need=

ratings, movies = [3, 4, 5], ["Alien"]


def uses_nothing() -> None:
    """A function of a module."""


def reads_ratings() -> int:
    return len(ratings)


@pytest.mark.parametrize(
    "need", ["ratings movies", "ratings, movies", "\n ratings,\n movies,\n", ["ratings", "movies"]]
)
def test_need_names_variables(need: Any) -> None:
    assert resolve_need(need, uses_nothing) == {"ratings": ratings, "movies": movies}


def test_need_may_give_values() -> None:
    assert resolve_need({"ratings": [1], "new": 2}, uses_nothing) == {"ratings": [1], "new": 2}
    assert in_ddp(1, reads_ratings, need={"ratings": [1]}) == 1
    assert ratings == [3, 4, 5]


@pytest.mark.parametrize(
    ("need", "error"),
    [(3, TypeError), ([3], TypeError), ({3: 4}, TypeError), ("a.b", ValueError), ("class", ValueError)],
)
def test_need_of_another_kind(need: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="need="):
        resolve_need(need, uses_nothing)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(NameError, match=r"'ratngs'.*Did you mean 'ratings'") as caught:
        resolve_need("movies ratngs", uses_nothing)
    assert caught.value.name == "ratngs"
    with pytest.raises(NameError, match=r"'zzzzzz'.*no such variable$"):
        resolve_need("zzzzzz", uses_nothing)


MISTAKES = """
import psutil
from nbdist import CaptureError, in_ddp

ratings, stuck = [], (i for i in ())
use = lambda: stuck
for error, fn, how in [
    (NameError, len, dict(need="ratngs")),
    (ValueError, len, dict(imports="x = 1")),
    (TypeError, "len", {}),
    (CaptureError, use, {}),
]:
    try:
        in_ddp(1, fn, **how)
    except error as caught:
        print(error.__name__, psutil.Process().children())
"""


def test_mistakes_are_found_before_any_process_starts(tmp_path: Path) -> None:
    out = run_python(["-c", MISTAKES], tmp_path)
    assert out.splitlines() == ["NameError []", "ValueError []", "TypeError []", "CaptureError []"]


# --------------------------------------------------------------------------------------------- what a function uses


def test_functions_classes_and_closures_bring_what_they_use(cell: Cell) -> None:
    cell("""
        import math as m
        K, OFFSET, later = 3, 100, lambda: EVEN_LATER
        def leaf(x): return x * K
        class Base:
            scale = 2
            def go(self, x): return leaf(x) * self.scale
        class Derived(Base):
            def go(self, x): return super().go(x) + OFFSET
        def make(n):
            def inner(x): return Derived().go(x) + n + sum(m.floor(i * K) for i in [1, 2])
            return inner
        def fn(x=K, *, call=make(1)): return call(x), later()
        EVEN_LATER = 'later'
        assert in_ddp(1, fn) == fn() == (3 * 3 * 2 + 100 + 1 + 9, 'later')
    """)


def test_callables_of_all_kinds(cell: Cell) -> None:
    cell("""
        import functools, math, operator
        N = 5
        def add(a, b=0): return a + b + N
        def decorated(fn):
            @functools.wraps(fn)
            def wrapper(*args): return 'wrapped', fn(*args), N
            return wrapper
        @decorated
        def wrapped(x): return add(x)
        class Model:
            n = N
            def __init__(self, k): self.k = k
            def method(self, x): return x + self.k + N
            def __call__(self, x): return self.method(x)
            @classmethod
            def of_class(cls, x): return cls.n + x
            @staticmethod
            def static(x): return x + N
            @property
            def squared(self): return self.k ** 2
            more = functools.partialmethod(method, 7)
        calls = [add, wrapped, decorated(math.sqrt), decorated(len), functools.partial(add, b=2), lambda x: add(x, N),
                 Model(3).method, Model(3), Model.of_class, Model.static, functools.partial(Model(1).method, 4),
                 functools.reduce, math.sqrt, operator.neg, str.upper, 'x'.join, Model, functools.lru_cache(add)]
        args = [[1], [1], [4.0], ['abc'], [1], [1], [1], [1], [1], [1], [], [add, [1, 2]], [4.0], [1], ['a'], ['ab'],
                [3], [1]]
        for call, arg in zip(calls, args, strict=True):
            want, got = call(*arg), in_ddp(1, call, *arg)
            assert (got == want) or (type(got) is Model and got.squared == 9 and got.more() == 15), (call, got)
        with Session(2) as s:
            assert s.run_all(lambda calls: [c(*a) for c, a in zip(calls[:6], args)], calls) == \\
                [[c(*a) for c, a in zip(calls[:6], args)]] * 2
    """)


def test_generators_coroutines_recursion_and_global_statements(cell: Cell) -> None:
    cell("""
        import asyncio
        LIMIT, counter = 3, 0
        def numbers():
            for i in range(LIMIT): yield i
        async def nap(): return LIMIT
        async def both(): return await asyncio.gather(nap(), nap())
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        def count():
            global counter, fresh
            counter += 1
            fresh = counter
            return counter, fresh
        def nested():
            class Local:
                value = LIMIT
                def get(self): return [LIMIT for _ in range(1) if (lambda: LIMIT)()]
            return Local().get() + [Local.value]
        assert in_ddp(1, lambda: (list(numbers()), asyncio.run(both()), even(10), count(), count(), nested())) == \\
            ([0, 1, 2], [3, 3], True, (1, 1), (2, 2), [3, 3])
        assert counter == 0 and 'fresh' not in globals()
    """)


def test_what_functions_share_they_share_in_the_rank(cell: Cell) -> None:
    cell("""
        shared, also = [], {}
        also['list'] = shared
        def pair():
            n = 0
            def add():
                nonlocal n
                n += 1
            def get(): return n
            return add, get
        add, get = pair()
        def extend(): shared.append(1)
        def fn(same):
            add(); add(); extend()
            return get(), shared, also['list'] is shared, same is shared
        assert in_ddp(1, fn, shared) == (2, [1], True, True)
        assert get() == 0 and shared == []
    """)


def test_a_redefined_class_is_the_one_in_use_on_every_rank_and_in_what_returns(cell: Cell) -> None:
    cell("""
        session = Session(2)
        class Model:
            version = 1
            def __init__(self): self.made_by = helper()
        def helper(): return 'old'
        def make(): return Model(), Model, [Model()]
        before, cls, _ = session.run(make)
        assert isinstance(before, Model) and cls is Model
    """)
    cell("""
        class Model:
            version = 2
            def __init__(self): self.made_by = helper()
        def helper(): return 'new'
        for value, cls, (inside,) in [*session.run_all(make), in_ddp(2, make)]:
            assert cls is Model and type(value) is type(inside) is Model
            assert (value.version, value.made_by) == (2, 'new')
        assert not isinstance(before, Model) and before.version == 1
        assert session.run(lambda old: (old, type(old).version, Model.version), before)[1:] == (1, 2)
        assert type(session.run(lambda old: old, before)) is type(before)
        session.close()
    """)


BY_VALUE = {
    "enum": """
        import enum
        class Color(enum.Enum):
            RED = 1
            BLUE = 'b'
            def show(self): return f'{self.name}!'
        class Flags(enum.IntFlag):
            A = enum.auto()
            B = enum.auto()
        out = in_ddp(1, lambda c: (c, Color.RED, c is Color.BLUE, c.show(), Flags.A | Flags.B), Color.BLUE)
        assert out == (Color.BLUE, Color.RED, True, 'BLUE!', Flags.A | Flags.B) and out[1] is Color.RED
    """,
    "dataclasses": """
        from dataclasses import dataclass, field, replace
        @dataclass
        class Config:
            lr: float = 0.1
            layers: list = field(default_factory=lambda: [LAYER])
        @dataclass(frozen=True, slots=True)
        class Point:
            x: int
            y: int = 2
        LAYER = 50
        out = in_ddp(1, lambda c, p: (replace(c, lr=1.0), Config(), p, hash(p), Point(3)), Config(), Point(1))
        assert out == (Config(1.0, [50]), Config(), Point(1), hash(Point(1)), Point(3, 2))
    """,
    "namedtuples": """
        import collections, typing
        Pair = collections.namedtuple('Pair', 'a b', defaults=[7])
        class Row(typing.NamedTuple):
            user: int
            item: int = 3
            def total(self): return self.user + self.item
        out = in_ddp(1, lambda p: (p, Pair(2), Row(1), Row(1).total()), Pair(1))
        assert out == (Pair(1, 7), Pair(2, 7), Row(1, 3), 4)
        assert type(out[0]) is Pair and type(out[2]) is Row
    """,
    "generics": """
        from typing import Generic, Protocol, TypedDict, TypeVar, runtime_checkable
        from collections.abc import Sequence
        T = TypeVar('T')
        class Box(Generic[T]):
            def __init__(self, value: T) -> None: self.value = value
            def get(self) -> T: return self.value
        class IntBox(Box[int]): pass
        class Options(TypedDict, total=False):
            lr: float
        @runtime_checkable
        class HasGet(Protocol):
            def get(self): ...
        def fn(box: Box[int], more: 'Sequence[T] | None' = None) -> Box[T]:
            return Box[str]('b'), box.get(), IntBox(4), Box[int], T, Options(lr=1.0), isinstance(box, HasGet), Options
        out = in_ddp(1, fn, Box(3))
        assert type(out[0]) is Box and out[1] == 3 and isinstance(out[2], Box) and out[3] == Box[int]
        assert out[5:7] == ({'lr': 1.0}, True) and out[7] is Options
    """,
    "abstract base classes": """
        import abc
        class Model(abc.ABC):
            @abc.abstractmethod
            def forward(self): ...
        class Dot(Model):
            def forward(self): return 'dot'
        @Model.register
        class Virtual: pass
        def fn(model):
            try:
                Model()
            except TypeError:
                return model, isinstance(model, Model), isinstance(Virtual(), Model), model.forward()
        out = in_ddp(1, fn, Dot())
        assert isinstance(out[0], Dot) and out[1:] == (True, True, 'dot')
    """,
    "a class that refers to itself": """
        class Node:
            root = None
            made = []
            def __init__(self, parent=None):
                self.parent, self.children = parent, [self]
                Node.made.append(self)
            def again(self): return __class__(self)
        Node.root = Node()
        def fn(node):
            child = node.again()
            return child, Node.root is node, node in Node.made, type(child) is Node
        out = in_ddp(1, fn, Node.root)
        assert type(out[0]) is Node and out[1:] == (True, True, True) and out[0].children[0] is out[0]
    """,
    "metaclasses": """
        class Registry(type):
            classes = {}
            def __new__(mcls, name, bases, space, **options):
                cls = super().__new__(mcls, name, bases, {**space, 'options': options})
                mcls.classes[name] = cls
                return cls
            def __init__(cls, name, bases, space, **options): super().__init__(name, bases, space)
        class A(metaclass=Registry, speed=3): pass
        class B(A): pass
        class Strict(type):
            def __new__(mcls, name, bases, space, needed): return super().__new__(mcls, name, bases, space)
            def __init__(cls, name, bases, space, needed): super().__init__(name, bases, space)
            def __call__(cls, *args): return 'made', super().__call__(*args)
        class C(metaclass=Strict, needed=True): pass
        out = in_ddp(1, lambda: (type(B) is Registry, A.options, Registry.classes['B'] is B, B(), C()))
        assert out[:3] == (True, {'speed': 3}, True) and type(out[3]) is B and type(out[4][1]) is C
    """,
    "hooks of class definitions": """
        class Base:
            registry = {}
            def __init_subclass__(cls, speed, **options):
                super().__init_subclass__(**options)
                Base.registry[cls.kind] = cls, speed
        class A(Base, speed=3): kind = 'a'
        class Field:
            def __set_name__(self, owner, name): self.name, self.owner = name, owner
            def __get__(self, obj, owner=None): return self.name, self.owner
        class Row: item = Field()
        def fn():
            class Later(Base, speed=4): kind = 'b'
            return Base.registry['a'][0] is A, sorted(Base.registry), Row().item == ('item', Row), A(), Later
        out = in_ddp(1, fn)
        assert out[:3] == (True, ['a', 'b'], True) and type(out[3]) is A
        assert out[4].kind == 'b' and issubclass(out[4], Base) and list(Base.registry) == ['a']
    """,
    "caches, dispatch and locks": """
        import functools, threading
        @functools.lru_cache(maxsize=16)
        def square(x): return x * x * ONE
        ONE = 1
        @functools.singledispatch
        def kind(x): return 'object'
        @kind.register
        def _(x: int): return 'int'
        class Lazy:
            calls = 0
            def __init__(self): self.lock, self.rlock = threading.Lock(), threading.RLock()
            @functools.cached_property
            def value(self):
                with self.lock, self.rlock:
                    type(self).calls += 1
                    return square(3)
            @functools.singledispatchmethod
            def show(self, x): return 'object'
            @show.register
            def _(self, x: str): return 'str'
        lock = threading.Lock()
        def fn(lazy):
            with lock:
                return lazy.value, lazy.value, lazy.calls, kind(1), kind('a'), lazy.show('a'), lazy.show(1), lazy
        out = in_ddp(1, fn, Lazy())
        assert out[:-1] == (9, 9, 1, 'int', 'object', 'str', 'object')
        assert square.cache_info().currsize == 0
        lock.acquire()
        assert in_ddp(1, lambda: lock.acquire(blocking=False))
        assert out[-1].value == 9 and kind(1) == 'int'
    """,
    "nested classes and slots": """
        class Outer:
            class Inner:
                __slots__ = ('x', '__y', '__weakref__')
                def __init__(self, x): self.x = self.__y = x
                def y(self): return self.__y
                class Innermost: value = 3
            def make(self): return self.Inner(4)
        def local():
            class Hidden:
                def __eq__(self, other): return type(other).__name__ == 'Hidden'
                __hash__ = None
            return Hidden
        Hidden = local()
        out = in_ddp(1, lambda o: (o.make(), Outer.Inner.Innermost.value, Outer.Inner(5), Hidden()), Outer())
        assert type(out[0]) is Outer.Inner and (out[0].x, out[1], out[2].x) == (4, 3, 5)
        assert type(out[3]) is Hidden and out[0].y() == 4 and not hasattr(out[0], '__dict__')
        assert not in_ddp(1, lambda o: hasattr(o.make(), '__dict__'), Outer())
    """,
    "exceptions": """
        class Bad(Exception):
            def __init__(self, code, *, why): super().__init__(f'{code}: {why}'); self.code, self.why = code, why
        out = in_ddp(1, lambda e: (e, Bad(2, why='so')), Bad(1, why='because'))
        assert [(type(e), e.code, e.why, str(e)) for e in out] == \\
            [(Bad, 1, 'because', '1: because'), (Bad, 2, 'so', '2: so')]
    """,
    "modules of torch": """
        import torch
        from torch import nn
        class Embedding(nn.Module):
            def __init__(self, n, k):
                super().__init__()
                self.weight = nn.Parameter(torch.full((n, k), SCALE))
                self.register_buffer('steps', torch.zeros(1))
                self.act = activation
                self.register_forward_hook(hook)
            def forward(self, i): return self.act(self.weight[i]).sum()
        SCALE = 2.0
        seen = []
        def hook(module, args, output): seen.append(1)
        def activation(x): return x * SCALE
        def fn(model):
            loss = model(torch.tensor([1])) + Embedding(3, 4)(torch.tensor([0]))
            loss.backward()
            return model, loss.item(), model.weight.grad.sum().item(), len(seen)
        out = in_ddp(2, fn, Embedding(3, 4))
        assert type(out[0]) is Embedding and out[1:] == (32.0, 8.0, 2) and isinstance(out[0].weight, nn.Parameter)
        assert out[0](torch.tensor([1])).item() == 16.0 and len(seen) == 1
    """,
    "weak references and modules": """
        import weakref, types, os.path as p
        class Thing: pass
        thing = Thing()
        ref, table = weakref.ref(thing), weakref.WeakValueDictionary(a=thing)
        assert in_ddp(1, lambda: (ref() is thing, table['a'] is thing, p.basename('a/b'))) == (True, True, 'b')
    """,
}


@pytest.mark.parametrize("case", BY_VALUE)
def test_objects_of_the_notebook(cell: Cell, case: str) -> None:
    cell(BY_VALUE[case])


# ------------------------------------------------------------------------------------------- imports= against need=


def test_names_that_the_import_block_gives_are_not_captured(cell: Cell) -> None:
    # A generator cannot be captured: were it tried, the call would fail.
    cell("""
        OrderedDict = sqrt = p = (i for i in ())
        block = '''
            from collections import OrderedDict
            from math import *
            import os.path as p
        '''
        def fn(): return OrderedDict(a=1), sqrt(4.0), p.basename('a/b')
        assert in_ddp(1, fn, imports=block) == ({'a': 1}, 2.0, 'b')
    """)


def test_an_import_that_shadows_what_the_notebook_defines_is_said(cell: Cell) -> None:
    result = cell("""
        def sqrt(x): return 'mine'
        print(in_ddp(1, lambda: sqrt(4.0), imports='from math import sqrt'))
    """)
    assert "2.0" in result.text and "'sqrt' is defined in the notebook" in result.text and "need=" in result.text


def test_need_goes_before_imports(cell: Cell) -> None:
    cell("""
        def sqrt(x): return 'mine'
        def fn(): return sqrt(4.0), floor(2.5)
        for block in ['from math import sqrt, floor', 'from math import *']:
            assert in_ddp(1, fn, imports=block, need='sqrt') == ('mine', 2)
            assert in_ddp(1, fn, imports=block, need={'floor': lambda x: 'given'}) == (2.0, 'given')
    """)


def test_imports_and_need_serve_code_that_is_made_at_run_time(cell: Cell) -> None:
    cell("""
        hidden = 3
        def fn(text): return eval(text)
        assert in_ddp(1, fn, 'floor(2.5) + hidden', imports='from math import *', need='hidden') == 5
    """)


def test_names_that_ipython_owns_are_no_obstacle(cell: Cell) -> None:
    cell("""
        def fn(name):
            with open(name, 'w') as file:
                file.write('x')
            if name is None:
                get_ipython(), display(name), exit(), quit(), In, Out, _, __, _oh
            return open(name).read()
        assert in_ddp(1, fn, 'written') == 'x'
    """)


def test_history_does_not_travel(cell: Cell) -> None:
    cell("(i for i in ())")  # now Out and _ hold what cannot be pickled
    cell("assert in_ddp(1, lambda: 1) == 1")


# ------------------------------------------------------------------------------------------ what cannot be captured


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def failure(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_call(fn, args, kwargs, "", {}, SentCache())
    return str(caught.value)


def test_the_path_to_what_cannot_be_pickled() -> None:
    stuck = (i for i in ())
    data = {"a": [1, Holder(stream=stuck)]}
    assert failure(lambda: data).startswith("data['a'][1].stream cannot be sent")
    assert failure(uses_nothing, 0, data).startswith("argument 2['a'][1].stream cannot")
    assert failure(uses_nothing, rows=(0, stuck)).startswith("argument rows[1] cannot")
    assert failure(Holder(x=stuck).__init__).startswith("the function.__self__.x cannot")
    assert "of type generator" in failure(uses_nothing, stuck)
    with pytest.raises(CaptureError, match=r"^rows\[0\] cannot"):
        capture_call(uses_nothing, (), {}, "", {"rows": [stuck]}, SentCache())


def test_things_that_belong_to_this_process(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file, socket.socket() as sock:
        for thing in (threading.Thread(), sys._getframe(), file, sock):
            assert failure(lambda: thing).startswith("thing")  # noqa: B023


def test_a_capture_error_in_the_notebook_names_the_variable(cell: Cell) -> None:
    cell("""
        import re
        stuck = (i for i in ())
        class Model:
            pass
        model = Model()
        model.feed = {'x': stuck}
        def helper(): return model
        def fn(): return helper()
        try:
            in_ddp(2, fn)
        except CaptureError as exc:
            assert str(exc).startswith("model.feed['x'] cannot be sent"), exc
        else:
            raise AssertionError('sent')
        del model.feed
        assert isinstance(in_ddp(2, fn), Model)
    """)


# --------------------------------------------------------------------------------------------- scripts, not notebooks

SCRIPT = """
import torch
import torch.distributed as dist
from nbdist import in_ddp

print("once")
SCALE = 10.0

class Answer:
    pass

def fn(answer):
    t = torch.full((), SCALE)
    dist.all_reduce(t)
    answer.value = t.item()
    return answer, __name__, type(answer) is Answer
"""
CALL = """
answer, name, same = in_ddp(2, fn, Answer())
print(type(answer) is Answer, answer.value, name, same)
"""
GUARDED = SCRIPT + "if __name__ == '__main__':\n" + CALL.replace("\n", "\n    ") + "\n"


def run_python(arguments: list[str], cwd: Path, stdin: str | None = None) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", [SCRIPT + CALL, GUARDED], ids=["unguarded", "guarded"])
def test_a_script(tmp_path: Path, code: str) -> None:
    (tmp_path / "script.py").write_text(code)
    assert run_python(["script.py"], tmp_path) == "once\nTrue 20.0 __main__ True\n"


def test_a_script_from_standard_input(tmp_path: Path) -> None:
    assert run_python(["-"], tmp_path, stdin=SCRIPT + CALL) == "once\nTrue 20.0 __main__ True\n"


def test_a_script_on_the_command_line(tmp_path: Path) -> None:
    assert run_python(["-c", SCRIPT + CALL], tmp_path) == "once\nTrue 20.0 __main__ True\n"


def test_a_module_that_is_run(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/script.py").write_text(GUARDED)
    assert run_python(["-m", "package.script"], tmp_path) == "once\nTrue 20.0 __main__ True\n"


def test_a_script_that_ipython_runs(cell: Cell, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(GUARDED)
    for how in ("", "-i"):
        assert "once\nTrue 20.0 __main__ True\n" in cell(f"%run {how} {tmp_path / 'script.py'}").text
    assert "20.0" in cell("print(in_ddp(2, fn, Answer())[0].value)").text  # what %run left in the notebook


def test_a_session_sees_what_later_cells_define(cell: Cell) -> None:
    cell("session = Session(1)\nstep = 1\ndef fn(): return step")
    cell("assert session.run(fn) == 1\nstep = 2")
    cell("assert session.run(fn) == 2\ndef step(): return 'function'\nassert session.run(fn)() == 'function'")
    cell("session.close()")
