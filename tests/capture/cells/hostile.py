"""An object that answers whatever it is asked with a RuntimeError, in each place that nbdist looks through."""

# %% the object
import contextlib
import json
import logging
import sys
import types
import warnings

from nbdist import CaptureError, Session, in_ddp, parallel_map


def refuse(self, *args):
    raise RuntimeError("nobody may ask")


class Meta(type):
    __getattribute__ = __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __repr__ = refuse


names = "getattribute eq hash bool len iter class repr call getitem contains reduce_ex".split()
body = {f"__{name}__": property(refuse) if name == "class" else refuse for name in names}
Hostile = type("Hostile", (), body)
HostileClass = Meta("HostileClass", (), {"__module__": "json"})
HostileModule = type("HostileModule", (types.ModuleType,), {"__getattribute__": refuse})
HostileFunction = type("HostileFunction", (), {**body, "__call__": lambda self: 5})
hostile = Hostile()


class Box:
    def __init__(self, value):
        self.value = value


def five():
    return 5


# %% around a call: patches, modules, hints, settings
def shout(self):
    return "!"


json.JSONDecoder.shout = shout  # from now on all classes and modules are looked through
json.JSONEncoder.hostile, json.hostile = hostile, hostile
sys.modules["hostile"], sys.modules["json.hostile"] = hostile, HostileModule("json.hostile")
logger = logging.getLogger("hostile")
logger.addHandler(type("Handler", (logging.Handler,), {"__eq__": refuse, "__hash__": logging.Handler.__hash__})())
logging.root.manager.loggerDict["worse"] = hostile


with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert in_ddp(2, lambda: (json.JSONDecoder().shout(), five())) == ("!", 5)
    with Session(1) as session:
        assert session.run(five) == 5 and "five" in str(session.explain(five)) and str(session.status())
        with contextlib.suppress(AttributeError):
            session.run(lambda: object().shout)
    assert parallel_map(lambda x: x + five(), [1, 2], workers=2, progress=False) == [6, 7]
    assert in_ddp(0, five) == 5
texts = [str(one.message) for one in said]
assert len(texts) == len(set(texts)) == 1 and "the notebook's settings of logging" in texts[0], texts
del sys.modules["hostile"], sys.modules["json.hostile"], logging.root.manager.loggerDict["worse"], json.hostile
del json.JSONEncoder.hostile, json.JSONDecoder.shout

# %% in a call: refused by name, in both directions
box, table = Box([1, hostile]), {"key": Box(hostile)}
key = {Box(1): (row for row in ())}
Box.__repr__ = refuse
for fn, args, name in [
    (lambda: hostile, (), "hostile"),
    (lambda: box, (), "box.value[1]"),
    (lambda: table, (), "table['key'].value"),
    (lambda: key, (), "key[<Box>]"),
    (lambda x: 5, (hostile,), "argument 1"),
    (HostileFunction(), (), "the function"),
]:
    try:
        in_ddp(1, fn, *args)
    except CaptureError as error:
        assert str(error).startswith(f"{name} cannot be sent"), error
    else:
        raise AssertionError(name)
try:
    in_ddp(1, lambda: Box([type("Hostile", (), body)()]))
except CaptureError as error:
    assert "returned.value[0] cannot be sent" in str(error), error
else:
    raise AssertionError
try:
    parallel_map(lambda x: 5, [hostile], workers=1, progress=False)
except CaptureError as error:
    assert "items[0]" in str(error), error
else:
    raise AssertionError
assert in_ddp(1, five) == 5

# %% in a rank: a call goes on with such objects around, and ends
from nbdist import Session


def leave_behind():
    import atexit
    import gc

    kept = [type("Hostile", (), body)() for _ in range(3)]
    atexit.register(lambda: print(len(kept), flush=True))
    sys.modules["__main__"].of_the_rank = kept[0]
    gc.collect()
    global file
    file = open("written", "w")  # noqa: SIM115
    file.write("to the end")
    return 5


with Session(2) as session:
    assert session.run_all(leave_behind) == [5, 5] and session.run_all(five) == [5, 5]
with open("written") as file:
    assert file.read() == "to the end"


# %% a failure among hostile objects is the user's
class Rude(Exception):
    __str__ = __repr__ = refuse


def rude():
    raise Rude(1)


try:
    in_ddp(1, rude)
except Rude as error:
    assert error.args == (1,)
else:
    raise AssertionError
