"""Settings that hold in ranks: each cell is a case of test_settings.py. `printed` takes what it has to print."""

# %% logging
import logging
import pathlib
import sys


class Upper(logging.Formatter):
    def format(self, record):
        return super().format(record).upper()


logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stdout)
log = logging.getLogger("mine")
log.setLevel(logging.DEBUG)
to_file = logging.FileHandler("log.txt")
to_file.setFormatter(Upper("%(message)s"))
log.addHandler(to_file)
logging.getLogger("quiet").setLevel(logging.ERROR)


def fn():
    log.debug("to both")
    logging.getLogger("quiet").warning("to none")
    logging.getLogger("other").info("to the root")


in_ddp(1, fn)
assert pathlib.Path("log.txt").read_text() == "TO BOTH\n"
to_file.addFilter(lambda record: False)
in_ddp(1, fn)
assert pathlib.Path("log.txt").read_text() == "TO BOTH\n", "a filter of a handler that ranks know"
printed.extend(["DEBUG: to both", "INFO: to the root"] * 2)
log.removeHandler(to_file)
to_file.close()
logging.root.handlers.clear()

# %% handlers of other streams
import io
import logging
import pathlib
import sys
import tempfile

kept = tempfile.NamedTemporaryFile("w")  # noqa: SIM115
streams = {
    "a": open("a.log", "a"),  # noqa: SIM115
    "w": open("w.log", "w"),  # noqa: SIM115
    "kept": kept,
    "memory": io.StringIO(),
    "nameless": tempfile.TemporaryFile("w"),  # noqa: SIM115
    "out": sys.stdout,
}
for name, stream in streams.items():
    logger = logging.getLogger(f"to_{name}")
    logger.propagate = False
    logger.setLevel("INFO")
    logger.addHandler(logging.StreamHandler(stream))


def fn():
    for name in ("a", "w", "kept", "memory", "nameless"):
        logging.getLogger(f"to_{name}").info("to none of the cell's streams")
    logging.getLogger("to_out").info("to the cell")


in_ddp(1, fn)
for name in ("a.log", "w.log", kept.name):
    assert pathlib.Path(name).read_text() == "to none of the cell's streams\n"
printed.append("to the cell")
for name, stream in streams.items():
    logging.getLogger(f"to_{name}").handlers.clear()
    if stream is not sys.stdout:
        stream.close()

# %% warnings
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("error")

    def fn():
        warnings.warn("now an error", stacklevel=1)

    try:
        in_ddp(1, fn)
    except UserWarning as exc:
        assert str(exc) == "now an error"
    else:
        raise AssertionError("ignored")
    in_ddp.options(settings=False)(1, fn)
    warnings.simplefilter("ignore")
    in_ddp(1, lambda: warnings.warn("ignored", stacklevel=1))

# %% numbers
import decimal
import sys

import numpy as np
import torch


def state():
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        np.get_printoptions()["precision"],
        np.geterr(),
        sys.getrecursionlimit(),
        decimal.getcontext().prec,
    )


before = state()
try:
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    np.set_printoptions(precision=3)
    np.seterr(divide="raise")
    sys.setrecursionlimit(4321)
    decimal.getcontext().prec = 5
    assert in_ddp(1, state) == state() != before
    assert in_ddp.options(settings=False)(1, state) != state()
finally:
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    np.set_printoptions(precision=8)
    np.seterr(divide="warn")
    sys.setrecursionlimit(3000)
    decimal.getcontext().prec = 28
assert in_ddp(1, state)[:2] == state()[:2]

# %% modes of torch that matter on GPUs
import torch

cuda, cudnn = torch.backends.cuda, torch.backends.cudnn


def state():
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        (torch.ones(1, 1) @ torch.ones(1, 1)).dtype,
    )


before = state()
try:
    cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = True, False, True
    cuda.enable_flash_sdp(False)
    cuda.enable_cudnn_sdp(False)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert in_ddp(1, state) == state()
        assert state()[-1] is torch.bfloat16
    with Session(1) as session:
        with torch.autocast("cpu", torch.bfloat16):
            assert session.run(state) == state()
        assert session.run(state) == state()
        assert session.run(torch.is_autocast_cache_enabled)
finally:
    cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = False, True, False
    cuda.enable_flash_sdp(True)
    cuda.enable_cudnn_sdp(True)
    torch.set_autocast_dtype("cuda", torch.float16)
assert in_ddp(1, state) == state() == before

# %% flags of torch's kernels
import pathlib

import torch

backends, C = torch.backends, torch._C
matmul = backends.cuda.matmul


def has(name):
    return hasattr(C, f"_get_{name}")


#: By name: how it is read, how it is set, and a value that is not the default.
flags = {
    "cudnn": (lambda: torch.backends.cudnn.enabled, lambda on: setattr(backends.cudnn, "enabled", on), False),
    "cudnn.deterministic": (
        lambda: torch.backends.cudnn.deterministic,
        lambda on: setattr(backends.cudnn, "deterministic", on),
        True,
    ),
    "fp16 sums": (
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        lambda on: setattr(matmul, "allow_fp16_reduced_precision_reduction", on),
        False,
    ),
    "bf16 sums": (
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda on: setattr(matmul, "allow_bf16_reduced_precision_reduction", on),
        False,
    ),
    "math attention": (
        lambda: torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
        backends.cuda.allow_fp16_bf16_reduction_math_sdp,
        True,
    ),
    "memory efficient attention": (
        lambda: torch.backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.enable_mem_efficient_sdp,
        False,
    ),
    "math": (lambda: torch.backends.cuda.math_sdp_enabled(), backends.cuda.enable_math_sdp, False),
    "nnpack": (lambda: torch._C._get_nnpack_enabled(), lambda on: backends.nnpack.set_flags(on), False),
    "quantized": (
        lambda: torch.backends.quantized.engine,
        lambda name: setattr(backends.quantized, "engine", name),
        next((name for name in backends.quantized.supported_engines if name != backends.quantized.engine), "none"),
    ),
    "attention in one kernel": (
        lambda: torch.backends.mha.get_fastpath_enabled(),
        backends.mha.set_fastpath_enabled,
        False,
    ),
    "warn only": (
        lambda: torch.get_deterministic_debug_mode(),
        torch.set_deterministic_debug_mode,
        1,
    ),
    "smallest numbers": (lambda: float.fromhex("0x1p-1074") * 1.0 == 0.0, torch.set_flush_denormal, True),
    "invariants": (
        lambda: torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        C._set_check_sparse_tensor_invariants,
        True,
    ),
    "cache of autocast": (lambda: torch.is_autocast_cache_enabled(), torch.set_autocast_cache_enabled, False),
    "swapped parameters": (
        lambda: torch.__future__.get_swap_module_params_on_conversion(),
        torch.__future__.set_swap_module_params_on_conversion,
        True,
    ),
    "distributions": (
        lambda: torch.distributions.Distribution._validate_args,
        torch.distributions.Distribution.set_default_validate_args,
        False,
    ),
    "hub": (lambda: torch.hub._hub_dir, lambda path: setattr(torch.hub, "_hub_dir", path), str(pathlib.Path("hub"))),
}
if has("cublas_allow_fp16_accumulation"):
    flags["fp16 accumulation"] = (
        lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
        lambda on: setattr(matmul, "allow_fp16_accumulation", on),
        True,
    )
if has("sdp_priority_order"):
    flags["order of attention"] = lambda: torch._C._get_sdp_priority_order(), C._set_sdp_priority_order, [2, 1, 0, 3, 4]
if has("mkldnn_deterministic"):
    flags["mkldnn.deterministic"] = lambda: torch._C._get_mkldnn_deterministic(), C._set_mkldnn_deterministic, True
reads = {name: read for name, (read, _, _) in flags.items()}


def state():
    return {name: read() for name, read in reads.items()}


before = state()
with Session(1, devices="cpu") as session:
    assert session.run(state) == before
    for name, (read, write, value) in flags.items():
        try:
            write(value)
            assert read() != before[name], name
            wanted = state()
            assert session.run(state) == wanted, name
        finally:
            write(before[name])
        assert session.run(state) == before, name

# %% a flag that ranks cannot set leaves the others
import warnings

import torch


def state():
    return torch.get_default_dtype(), torch.is_warn_always_enabled()


def refuse():
    torch.set_default_dtype = None


with Session(1, devices="cpu") as session, warnings.catch_warnings(record=True) as said:
    session.run(refuse)
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_warn_always(True)
        assert session.run(state) == (torch.float32, True)
        assert "the notebook's setting 'dtype' of torch is not set in this rank: TypeError" in session.logs(0)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_warn_always(False)
    assert session.run(state) == (torch.float32, False)

# %% precisions of oneDNN by the newer names
import torch


def precision():
    return torch.backends.mkldnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision


if hasattr(torch.backends, "fp32_precision"):
    before = precision()
    with Session(1, devices="cpu") as session:
        for module in (torch.backends.mkldnn.conv, torch.backends.cudnn.rnn):
            kept = module.fp32_precision
            try:
                module.fp32_precision = "ieee"
                assert session.run(precision) == precision() != before
            finally:
                module.fp32_precision = kept
            assert session.run(precision) == before

# %% inference mode
import torch


def state():
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), (torch.ones(1) * 2).is_inference()


with Session(1, devices="cpu") as session:
    for _ in range(2):
        with torch.inference_mode():
            assert session.run(state) == in_ddp(1, state) == (True, False, True)
            with torch.inference_mode(False):
                assert session.run(state) == (False, torch.is_grad_enabled(), False)
        assert session.run(state) == (False, True, False)

# %% settings of torch.compile
import importlib

import torch

MODULES = "torch._dynamo", "torch._functorch.config", "torch._inductor.config"
for module in MODULES:  # a cell's import statements would be executed in the ranks, too
    importlib.import_module(module)


def fn(x):
    return x + 1


def state():
    for module in MODULES:
        importlib.import_module(module)
    return (
        torch._dynamo.config.suppress_errors,
        torch._inductor.config.max_autotune,
        torch._inductor.config.triton.cudagraphs,
        torch._inductor.config.external_matmul,
        torch._functorch.config.donated_buffer,
        torch._dynamo.eval_frame._stance.stance,
    )


def loaded():
    import sys

    return "torch._inductor.config" in sys.modules


before = state()
with Session(1, devices="cpu", start="spawn") as session:  # which has not imported these modules
    assert not session.run(loaded)
    try:
        torch._dynamo.config.suppress_errors = True
        torch._inductor.config.external_matmul.append(fn)
        torch.compiler.set_stance("force_eager")
        with torch._inductor.config.patch({"max_autotune": True, "triton.cudagraphs": True}):
            assert not session.run(loaded), "a rank imports nothing for a setting"
            found, wanted = session.run(state), state()
            assert found[:3] == wanted[:3] == (True, True, True) and found[4:] == wanted[4:]
            assert [one(1) for one in found[3]] == [2]
        torch._functorch.config.donated_buffer = False
        assert session.run(state)[1:3] == (False, False)
        assert session.run(state)[4] is False
    finally:
        torch._dynamo.config.suppress_errors = before[0]
        torch._inductor.config.external_matmul.clear()
        torch._functorch.config.donated_buffer = before[4]
        torch.compiler.set_stance("default")
    assert session.run(state) == state() == before

# %% a setting of torch.compile that cannot be sent
import warnings

import torch
import torch._inductor.config

with Session(1, devices="cpu") as session, warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    try:
        torch._inductor.config.max_autotune = True
        torch._inductor.config.external_matmul.append(i for i in ())
        for _ in range(2):
            assert session.run(lambda: __import__("torch._inductor.config")._inductor.config.max_autotune)
    finally:
        torch._inductor.config.external_matmul.clear()
        torch._inductor.config.max_autotune = False
texts = [str(one.message) for one in said if "external_matmul" in str(one.message)]
assert len(texts) == 1 and "torch._inductor.config.external_matmul, which the notebook has set" in texts[0], texts

# %% globals that torch.load may use
import fractions
import io

import torch


class Own:
    def __init__(self, value):
        self.value = value


def load(text):
    return torch.load(io.BytesIO(text), weights_only=True)


def safe(name):
    return [str(one) for one in torch.serialization.get_safe_globals() if name in str(one)]


written = io.BytesIO()
torch.save({"own": Own(3), "number": 2}, written)
with Session(1, devices="cpu") as session:
    try:
        session.run(load, written.getvalue())
        raise AssertionError("the class is not safe yet")
    except Exception as exc:
        assert "add_safe_globals" in str(exc), exc
    torch.serialization.add_safe_globals([Own, (fractions.Fraction, "fractions.Fraction")])
    assert session.run(safe, "Fraction") == in_ddp(1, safe, "Fraction") == safe("Fraction") != []
    assert session.run(load, written.getvalue())["own"].value == in_ddp(1, load, written.getvalue())["own"].value == 3
    torch.serialization.clear_safe_globals()
    assert session.run(safe, "Own") == session.run(safe, "Fraction") == []

# %% precision of float32 by the newer names
import torch

if hasattr(torch.backends, "fp32_precision"):
    matmul = torch.backends.cuda.matmul

    def precision():
        return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision

    before = precision()
    with Session(1) as session:
        try:
            matmul.fp32_precision = "tf32"  # torch then refuses to be asked for `get_float32_matmul_precision()`
            assert session.run(precision) == precision() != before
            torch.backends.fp32_precision = "ieee"
            assert session.run(lambda: torch.backends.fp32_precision) == "ieee"
        finally:
            torch.backends.fp32_precision = "none"
            torch.set_float32_matmul_precision("highest")
        assert session.run(torch.get_float32_matmul_precision) == "highest"
        assert session.run(lambda: torch.backends.fp32_precision) == "none"

# %% the default device
import torch


def where():
    return torch.ones(1).device.type


data = torch.arange(10_000)
with Session(1, devices="cpu") as session:
    for device, wanted in {"cuda": "cpu", "meta": "meta", "cpu": "cpu"}.items():
        try:
            torch.set_default_device(device)
            assert session.run(where) == wanted
            assert session.run(lambda: data.sum().item()) == 49_995_000
        finally:
            torch.set_default_device(None)
    assert session.run(where) == "cpu"

# %% pandas and matplotlib
import matplotlib
import pandas as pd


def state():
    return pd.get_option("display.max_rows"), matplotlib.rcParams["lines.linewidth"]


with Session(1) as session:
    default = session.run(state)
    pd.set_option("display.max_rows", 7)
    matplotlib.rcParams["lines.linewidth"] = 9.0
    assert session.run(state) == (7, 9.0)
    session.run(lambda: pd.set_option("display.max_rows", 3))
    assert session.run(state) == (3, 9.0)  # a rank's own
    pd.reset_option("display.max_rows")
    matplotlib.rcdefaults()
    assert session.run(state) == default

# %% locale
import locale

locale.setlocale(locale.LC_ALL, "C.UTF-8")
assert in_ddp(1, lambda: locale.setlocale(locale.LC_ALL)) == locale.setlocale(locale.LC_ALL)

# %% patched modules
import statistics

FACTOR = 3


def mean(data):
    return FACTOR * sum(data)


statistics.mean = mean


def fn():
    import statistics

    return statistics.mean([1, 2])


assert in_ddp(1, fn) == 9

# %% patched classes
import fractions

import pandas as pd
from fastcore.basics import patch

SCALE = 3


@patch
def scaled(self: fractions.Fraction):
    return self * SCALE


@patch(as_prop=True)
def half(self: fractions.Fraction):
    return self / 2


@pd.api.extensions.register_dataframe_accessor("rows_of")
class RowsOf:
    def __init__(self, frame):
        self.frame = frame

    def count(self):
        return len(self.frame) * SCALE


def fn():
    frame = pd.DataFrame({"a": [1]})
    return fractions.Fraction(1, 3).scaled(), fractions.Fraction(1).half, frame.rows_of.count()


assert in_ddp(1, fn) == fn()
SCALE = 4
assert in_ddp(1, fn) == fn()
try:
    in_ddp.options(settings=False)(1, fn)
except AttributeError:
    pass
else:
    raise AssertionError("patched")

# %% registries of libraries
import collections.abc
import copyreg
import numbers
import pickle
import pkgutil
import shutil

import torch
import yaml
from torch.utils import _pytree


class Money:
    def __init__(self, value=1):
        self.value = value
        self.lines = (line for line in ())  # cannot be pickled


class Rows:
    path = "rows"


SIGN = "!"
numbers.Number.register(Money)
collections.abc.Sequence.register(Rows)
copyreg.pickle(Money, lambda money: (Money, (money.value,)))
yaml.SafeLoader.add_constructor("!sign", lambda loader, node: SIGN)
shutil.register_archive_format("mine", lambda *args: SIGN)
_pytree.register_pytree_node(Money, lambda money: ([money.value], None), lambda parts, context: Money(*parts))


@pkgutil.iter_importer_modules.register(Rows)
def _(importer, prefix=""):
    return iter([(importer.path, False)])


kept = Money(7)


def fn():
    return (
        isinstance(kept, numbers.Number),
        issubclass(Rows, collections.abc.Sequence),
        pickle.loads(pickle.dumps(kept)).value,
        yaml.safe_load("a: !sign x"),
        [name for name, _ in shutil.get_archive_formats()],
        _pytree.tree_leaves(kept),
        list(pkgutil.iter_importer_modules(Rows())),
    )


try:
    with Session(1) as session:
        assert session.run(fn) == in_ddp(1, fn) == fn()
        SIGN = "?"
        shutil.unregister_archive_format("mine")
        assert session.run(fn) == in_ddp(1, fn) == fn()
        assert "mine" not in fn()[4] and fn()[3] == {"a": "?"}
        yaml.SafeLoader.yaml_constructors.pop("!sign")
        try:
            session.run(fn)
        except yaml.constructor.ConstructorError:
            pass
        else:
            raise AssertionError("taken back")
finally:
    copyreg.dispatch_table.pop(Money, None)
    _pytree.SUPPORTED_NODES.pop(Money, None)

# %% what a cell registers and patches after a call
import copyreg
import fractions

import matplotlib
from matplotlib.colors import ListedColormap

from nbdist.capture import patches, registries


class Money:
    pass


def patch_to(owner):
    def put(fn):
        setattr(owner, fn.__name__, fn)
        return fn

    return put


def register_late():
    copyreg.pickle(fractions.Fraction, lambda number: (Money, ()))


def colormaps():
    return list(matplotlib.colormaps)


searches = []


def counted(search):
    return lambda *args: (searches.append(search), search(*args))[1]


with Session(1) as session:
    assert session.run(lambda: Money in copyreg.dispatch_table) is False
    copyreg.pickle(Money, lambda money: (Money, ()))
    assert session.run(lambda: Money in copyreg.dispatch_table) is True

    @patch_to(fractions.Fraction)
    def twice(self):
        return 2 * self

    assert session.run(lambda: fractions.Fraction(1, 4).twice()) == fractions.Fraction(1, 2)
    for name in ["one color", "two colors", "three colors"]:
        matplotlib.colormaps.register(ListedColormap(["red"], name=name))
        assert name in session.run(colormaps)
        matplotlib.colormaps.unregister(name)
    assert not {"one color", "two colors", "three colors"}.intersection(session.run(colormaps))
    register_late()
    assert session.run(lambda: fractions.Fraction in copyreg.dispatch_table) is True
    del copyreg.dispatch_table[Money], copyreg.dispatch_table[fractions.Fraction], fractions.Fraction.twice
    both = patches._search, registries._search
    patches._search, registries._search = map(counted, both)
    for step in range(5):
        session.note = step
        session.run(str, register_late.__name__)  # may register, and does not
    assert len(searches) <= 4, searches
    patches._search, registries._search = both

# %% an entry that cannot be sent
import copyreg
import warnings

from nbdist import in_ddp


class Stuck:
    pass


generator = (i for i in ())
copyreg.pickle(Stuck, lambda stuck: next(generator))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert in_ddp(1, lambda: Stuck in copyreg.dispatch_table) is False
    in_ddp(1, int)
said = [str(one.message) for one in said if "copyreg" in str(one.message)]
assert len(said) == 1 and said[0].startswith("copyreg.dispatch_table, which the notebook has set, is not set"), said
copyreg.dispatch_table.pop(Stuck)

# %% modes of Python
import builtins
import csv
import gc
import os
import signal
import sys
import threading

seen = []


def note(*args):
    seen.append(type(args[0]).__name__)


def state():
    mask = os.umask(0o077)
    os.umask(mask)
    seen.clear()
    if signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN):
        os.kill(os.getpid(), signal.SIGUSR1)
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    return (
        mask,
        [*seen],
        gc.isenabled(),
        gc.get_threshold(),
        csv.field_size_limit(),
        sys.getswitchinterval(),
        sys.argv[1:] if sys.argv[0] == "mine" else None,
        getattr(builtins, "of_the_cell", None),
        str(signal.getsignal(signal.SIGUSR2)),
    )


kept = state(), sys.argv, signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGUSR2), threading.excepthook
with Session(1) as session:
    assert session.run(state) == state()
    try:
        os.umask(0o027)
        gc.disable()
        gc.set_threshold(900, 5, 5)
        csv.field_size_limit(1 << 30)
        sys.setswitchinterval(0.0625)
        sys.argv = ["mine", "--rate", "3"]
        builtins.of_the_cell = 5
        signal.signal(signal.SIGUSR1, note)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        threading.excepthook = note
        assert session.run(state) == in_ddp(1, state) == state() != kept[0]
        assert in_ddp(1, lambda: of_the_cell + 1) == 6
    finally:
        os.umask(kept[0][0])
        gc.enable()
        gc.set_threshold(*kept[0][3])
        csv.field_size_limit(kept[0][4])
        sys.setswitchinterval(kept[0][5])
        _, sys.argv, first, second, threading.excepthook = kept
        signal.signal(signal.SIGUSR1, first)
        signal.signal(signal.SIGUSR2, second)
        del builtins.of_the_cell
    assert session.run(state) == state() == kept[0]

# %% modes of Python, NumPy and torch that only threads, sockets, files and loaders show
import csv
import decimal
import logging
import multiprocessing
import os
import socket
import threading
import time
import warnings

import numpy as np
import torch


def in_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(decimal.getcontext().prec))
    thread.start()
    thread.join()
    return found


class Semicolons(csv.excel):
    delimiter = ";"


def state():
    return (
        in_thread(),
        decimal.DefaultContext.traps[decimal.Inexact],
        {name: next(csv.reader(["a|b;c"], name)) for name in csv.list_dialects()},
        socket.getdefaulttimeout(),
        warnings.showwarning is logging._showwarning,
        np.getbufsize(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.autograd.is_multithreading_enabled(),
        torch.multiprocessing.get_sharing_strategy(),
    )


def use_sockets():
    torch.distributed.barrier()
    with multiprocessing.Manager() as manager:
        shared = manager.dict(rank=torch.distributed.get_rank())
        time.sleep(0.1)  # longer than a socket waits
        return shared["rank"]


kept = state()
with Session(2) as session:
    assert session.run(state) == kept
    try:
        decimal.DefaultContext.prec = 9
        decimal.DefaultContext.traps[decimal.Inexact] = True
        csv.register_dialect("pipes", delimiter="|")
        csv.register_dialect("semicolons", Semicolons)
        socket.setdefaulttimeout(0.05)
        logging.captureWarnings(True)
        np.setbufsize(16_384)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.autograd.set_multithreading_enabled(False)
        torch.multiprocessing.set_sharing_strategy("file_system")
        now = state()
        assert session.run(state) == in_ddp(1, state) == now, (session.run(state), now)
        assert all(one != other for one, other in zip(now, kept, strict=True)), now
        assert session.run_all(use_sockets) == [0, 1]
        with Session(1) as late:  # its channels wait longer than a socket of the notebook
            assert late.run(os.getpid) == late.run(os.getpid)
        csv.unregister_dialect("pipes")
        assert session.run(state) == state()
    finally:
        decimal.DefaultContext.prec = 28
        decimal.DefaultContext.traps[decimal.Inexact] = False
        csv.unregister_dialect("semicolons")
        socket.setdefaulttimeout(None)
        logging.captureWarnings(False)
        np.setbufsize(kept[5])
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.autograd.set_multithreading_enabled(True)
        torch.multiprocessing.set_sharing_strategy(kept[8])
    assert session.run(state) == state() == kept, (session.run(state), kept)

# %% loggers with filters, handlers and levels of the notebook
import logging

MARK = "marked"


class Marks(logging.Filter):
    def filter(self, record):
        record.msg = f"{MARK} {record.msg}"
        return "drop" not in record.msg


class Printer(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.getMessage())


class Loud(logging.Logger):
    def notice(self, text):
        self.log(25, text)


log = logging.getLogger("of_the_cell")
log.setLevel(logging.INFO)
log.propagate = False
log.addHandler(Printer())
log.addFilter(Marks())
logging.addLevelName(25, "NOTICE")
logging.setLoggerClass(Loud)


def fn():
    log.info("drop")
    log.log(25, "text")
    return type(logging.getLogger("a_new_one")).__name__


with Session(1) as session:
    assert session.run(fn) == "Loud"
    printed.append("NOTICE marked text")
    log.filters.clear()
    logging.setLoggerClass(logging.Logger)
    session.run(fn)
    printed.extend(["INFO drop", "NOTICE text"])
log.handlers.clear()

# %% modes of torch, options of NumPy, polars and scikit-learn
import numpy as np
import polars as pl
import sklearn
import torch


def state():
    return (
        str(torch.tensor([1 / 3])),
        torch.is_anomaly_enabled(),
        torch.is_warn_always_enabled(),
        torch.backends.mkldnn.enabled,
        np.geterrcall() is None,
        str(pl.DataFrame({"a": [1 / 3]})),
        sklearn.get_config()["assume_finite"],
    )


before = state()
with Session(1) as session:
    assert session.run(state) == before
    try:
        torch.set_printoptions(precision=2)
        torch.autograd.set_detect_anomaly(True)
        torch.set_warn_always(True)
        torch.backends.mkldnn.enabled = False
        np.seterrcall(lambda *args: None)
        pl.Config.set_float_precision(1)
        sklearn.set_config(assume_finite=True)
        assert session.run(state) == in_ddp(1, state) == state()
        assert not set(state()) & {*before} - {True, False}
    finally:
        torch.set_printoptions(profile="default")
        torch.autograd.set_detect_anomaly(False)
        torch.set_warn_always(False)
        torch.backends.mkldnn.enabled = True
        np.seterrcall(None)
        pl.Config.restore_defaults()
        sklearn.set_config(assume_finite=False)
    assert session.run(state) == state() == before

# %% namespaces of polars
import polars as pl

FACTOR = 2


@pl.api.register_expr_namespace("of_the_cell")
class Times:
    def __init__(self, expression):
        self.expression = expression

    def times(self):
        return self.expression * FACTOR


assert in_ddp(1, lambda: pl.select(pl.lit(3).of_the_cell.times()).item()) == 6
del pl.Expr.of_the_cell

# %% context variables
import contextvars

rate, text = contextvars.ContextVar("rate", default=0.1), contextvars.ContextVar("text")


def fn(change=0.0):
    if change:
        rate.set(change)
    return rate.get(), text.get("none")


with Session(1) as session:
    assert session.run(fn) == in_ddp(1, fn) == fn() == (0.1, "none")
    rate.set(0.5), text.set("here")
    assert session.run(fn) == in_ddp(1, fn) == fn() == (0.5, "here")
    assert session.run(fn, 0.75) == (0.75, "here") and rate.get() == 0.5
    assert session.run(lambda: rate) is rate and rate.get() == 0.5

# %% levels that a library sets at its import
import logging
import os
import pathlib
import sys

os.makedirs("noisy/site-packages")
for name in ("noisy_library", "noisy_module"):
    text = f"import logging\n\nlog = logging.getLogger({name!r})\nlog.setLevel('INFO')\n"
    pathlib.Path(f"noisy/site-packages/{name}.py").write_text(text)
sys.path.append(os.path.abspath("noisy/site-packages"))
import noisy_library
import noisy_module


def levels():
    return noisy_library.log.level, logging.getLogger("noisy_module").level


with Session(1) as session:
    logging.getLogger("noisy_library").setLevel("ERROR")
    logging.getLogger("noisy_module").setLevel("ERROR")
    assert session.run(int) == 0  # a call that imports neither has the levels
    assert session.run(levels) == (logging.ERROR, logging.ERROR)
    noisy_module.log.setLevel("DEBUG")
    assert session.run(levels) == (logging.ERROR, logging.DEBUG)
sys.path.pop()
