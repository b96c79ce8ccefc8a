"""Objects of the standard library and of the libraries that notebooks use, each as the expression that makes it.

`python tests/capture/objects.py` writes docs/objects.md: which of them arrive in a rank, and which are refused.
"""

# ruff: noqa
from __future__ import annotations

import functools
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

STANDARD = """
None; True; ...; NotImplemented; 0; -1; 10**30; 0.1; float('inf'); 1e-320; 2+3j; 'text'; 'Ünïcode 😀'; ''; b'bytes'
bytearray(b'ab'); memoryview(b'abc'); [1, [2, [3]]]; (1, (2,)); {1, 2}; frozenset({1, 'a'}); {'a': {'b': [1]}}; range(2, 9, 3)
slice(1, None, 2); int; type; object; len; sum; print; str.upper; 'a b'.split; [].append; {}.get; math.sqrt; type(None); type(...)
collections.OrderedDict(a=1, b=2); collections.defaultdict(list, a=[1]); collections.Counter('abca'); collections.deque([1, 2], 3)
collections.ChainMap({'a': 1}, {'b': 2}); collections.UserDict(a=1); collections.UserList([1]); collections.UserString('a')
collections.namedtuple('Pair', 'a b')(1, 2); types.SimpleNamespace(a=1); types.MappingProxyType({'a': 1}); {'a': 1}.keys()
{'a': 1}.values(); {'a': 1}.items(); collections.OrderedDict(a=1).keys(); array.array('d', [1.0, 2.0]); array.array('i')
datetime.date(2020, 2, 29); datetime.time(1, 2, 3, 4); datetime.datetime(2020, 1, 2, 3, 4, 5); datetime.timedelta(1, 2, 3)
datetime.timezone.utc; datetime.timezone(datetime.timedelta(hours=2), 'x'); datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)
zoneinfo.ZoneInfo('Europe/Rome'); datetime.datetime(2020, 7, 1, tzinfo=zoneinfo.ZoneInfo('Asia/Tokyo')); calendar.TextCalendar(6)
decimal.Decimal('1.10'); decimal.Decimal('NaN'); decimal.Context(prec=7); fractions.Fraction(1, 3); uuid.UUID(int=5)
ipaddress.ip_address('10.0.0.1'); ipaddress.ip_network('10.0.0.0/8'); ipaddress.ip_address('::1'); pathlib.Path('/a/b'); pathlib.PurePosixPath('a')
pathlib.PureWindowsPath('c:/a'); re.compile('a(b)', re.I); re.compile(rb'x'); re.IGNORECASE; string.Template('$a'); string.Formatter()
textwrap.TextWrapper(30); functools.partial(max, 3); functools.partial(int, base=2); functools.partialmethod(len); functools.cmp_to_key(len)
functools.lru_cache(len); functools.cached_property(len); functools.singledispatch(lambda x: x); operator.itemgetter(1, 2); operator.attrgetter('a.b')
operator.methodcaller('upper'); operator.add; itertools.count(3); itertools.repeat(1, 3); itertools.chain([1], [2]); itertools.product([1, 2])
itertools.accumulate([1, 2]); itertools.islice([1, 2, 3], 2); itertools.permutations([1, 2]); itertools.combinations([1, 2, 3], 2); zip([1], [2])
map(len, ['a']); filter(None, [1]); enumerate(['a']); reversed([1, 2]); iter([1, 2]); iter({'a': 1}); iter({1}); iter((1,)); iter('ab'); iter(range(3))
(i for i in range(3)); lambda: 1; lambda x, *a, y=2, **k: (x, y); property(len); classmethod(len); staticmethod(len); super
random.Random(3); random.getstate(); random.SystemRandom(); secrets.token_hex; hashlib.sha256(b'a'); hmac.new(b'k', b'm', 'sha1'); zlib.compressobj()
statistics.NormalDist(1, 2); enum.Enum('Color', 'RED BLUE'); enum.Enum('Color', 'RED BLUE').RED; enum.IntFlag('Perm', 'R W').R; enum.auto()
dataclasses.make_dataclass('Point', ['x', 'y'])(1, 2); dataclasses.field(default=1); dataclasses.MISSING; abc.ABC; abc.ABCMeta
typing.List[int]; typing.Dict[str, typing.Any]; typing.Optional[int]; typing.Union[int, str]; typing.Callable[[int], str]; typing.Any; typing.Literal['a']
typing.TypeVar('T'); typing.TypeVar('B', bound=int); typing.ParamSpec('P'); typing.NewType('Id', int); typing.NamedTuple('Row', [('a', int)])(1)
typing.TypedDict('Movie', {'name': str}); typing.ForwardRef('X'); typing.Generic; typing.Annotated[int, 'x']; list[int]; dict[str, int]; int | None
ValueError('a', 1); KeyError('k'); OSError(2, 'no', 'f'); UnicodeDecodeError('utf8', b'a', 0, 1, 'why'); StopIteration(3); SystemExit(2)
ExceptionGroup('g', [ValueError(1)]); json.JSONEncoder(indent=2); json.JSONDecoder(); json.JSONDecodeError('m', 'd', 1); csv.excel; csv.Sniffer()
io.StringIO('text'); io.BytesIO(b'bytes'); sys.stdout; sys.stderr; sys.stdin; open('/dev/null'); open('/dev/null', 'wb'); io.TextIOWrapper(io.BytesIO())
tempfile.TemporaryFile(); tempfile.gettempdir; socket.socket(); subprocess.Popen(['true']); subprocess.CompletedProcess(['a'], 0, 'out')
threading.Lock(); threading.RLock(); threading.Event(); threading.Condition(); threading.Semaphore(2); threading.Barrier(2); threading.local()
threading.Thread(); threading.current_thread(); threading.Timer(1, len); queue.Queue(3); queue.SimpleQueue(); queue.PriorityQueue(); concurrent.futures.ThreadPoolExecutor(1)
concurrent.futures.Future(); multiprocessing.Lock(); multiprocessing.Queue(); multiprocessing.Value('i', 3); multiprocessing.Pipe()[0]; multiprocessing.get_context('spawn')
asyncio.Lock(); asyncio.Event(); asyncio.Queue(); asyncio.new_event_loop(); contextvars.ContextVar('c'); contextvars.copy_context(); contextlib.nullcontext(1)
contextlib.ExitStack(); contextlib.suppress(ValueError); weakref.ref(C()); weakref.WeakSet(); weakref.WeakValueDictionary(); weakref.WeakKeyDictionary()
logging.getLogger('a.b'); logging.getLogger(); logging.Formatter('%(message)s'); logging.StreamHandler(); logging.NullHandler(); logging.FileHandler('/dev/null'); logging.LogRecord('n', 1, 'p', 2, 'm', (), None)
argparse.Namespace(a=1); argparse.ArgumentParser('p'); configparser.ConfigParser(); urllib.parse.urlparse('http://a/b?c'); urllib.request.Request('http://a'); http.cookies.SimpleCookie('a=1')
email.message.EmailMessage(); xml.etree.ElementTree.fromstring('<a b="1"><c/></a>'); xml.dom.minidom.parseString('<a/>'); html.parser.HTMLParser(); sqlite3.connect(':memory:'); zipfile.ZipInfo('a')
ast.parse('a + 1'); compile('a + 1', 'f', 'eval'); dis.Bytecode(len.__class__); inspect.signature(lambda a, b=1: a); inspect.Parameter('a', inspect.Parameter.KEYWORD_ONLY); sys._getframe()
types.ModuleType('made'); math; os.path; collections.abc.Mapping; types.FunctionType; types.MethodType(len, []); types.CellType(1); types.GenericAlias(list, (int,)); platform.uname(); os.stat('/dev/null')
time.gmtime(0); time.struct_time(range(9)); struct.Struct('<i'); codecs.lookup('utf8'); locale.localeconv(); ctypes.c_int(3); (ctypes.c_int * 3)(1, 2, 3); ctypes.pointer(ctypes.c_int(1)); shelve.Shelf({}); graphlib.TopologicalSorter({'a': ['b']})
heapq.merge([1], [2]); bisect.bisect; copy.copy; pickle.PickleBuffer(b'a'); warnings.catch_warnings(); traceback.TracebackException(ValueError, ValueError(1), None); optparse.OptionParser(); sched.scheduler(); gettext.NullTranslations(); mimetypes.MimeTypes()
"""

NUMPY = """
np.float32(1.5); np.int64(3); np.bool_(True); np.str_('a'); np.bytes_(b'a'); np.complex64(1j); np.datetime64('2020-01-01'); np.datetime64('NaT'); np.timedelta64(3, 'h'); np.void(b'abc')
np.arange(5); np.arange(100_000); np.zeros((0, 3)); np.array(3.0); np.arange(12).reshape(3, 4).T; np.arange(12).reshape(3, 4)[:, ::2]; np.arange(9)[::-1]; np.broadcast_to(np.arange(3), (4, 3)); np.asfortranarray(np.ones((3, 4)))
np.ones(3, 'f2'); np.ones(3, 'f4'); np.ones(3, '>f8'); np.ones(3, 'i1'); np.ones(3, 'u2'); np.ones(3, '>i4'); np.ones(3, 'u8'); np.ones(3, 'c8'); np.ones(3, 'c16'); np.ones(3, bool); np.ones(3, np.longdouble)
np.array(['a', 'bcd']); np.array([b'a', b'bcd']); np.array([{'a': 1}, None], object); np.array(['2020', '2021'], 'M8[D]'); np.array([1, 2], 'm8[s]'); np.array([(1, 2.0)], [('a', 'i4'), ('b', 'f8')]); np.array(['x', 'long text'], np.dtypes.StringDType())
np.rec.fromarrays([[1, 2], [3.0, 4.0]], names='a,b'); np.ma.masked_equal([1, 2, 3], 2); np.ma.masked; np.matrix([[1, 2]]); np.memmap('/tmp/nbdist-objects', 'f4', 'w+', shape=4); np.char.array(['a', 'b']); Signal(np.ones(3), 44)
np.dtype('f4'); np.dtype('M8[ns]'); np.dtype([('a', 'i4')]); np.float64; np.generic; np.sin; np.add; np.add.reduce; np.linalg.norm; np.random; np.random.default_rng(3); np.random.RandomState(3); np.random.get_state(); np.random.PCG64(1); np.random.SeedSequence(5)
np.random.Philox(2); np.random.default_rng; np.vectorize(len); np.poly1d([1, 2]); np.polynomial.Polynomial([1, 2]); np.nditer(np.arange(3)); np.ndindex(2, 3); np.flatiter; np.arange(3).flat; np.errstate(divide='raise'); np.iinfo('i4'); np.finfo('f4'); np.s_[1:2, ...]; np.index_exp[0]; np.newaxis; np.nan; np.inf
np.lib.stride_tricks.sliding_window_view(np.arange(5), 2); np.ones((2, 3, 4), order='F'); np.array([], 'U5'); np.full(20_000, 'abc'); np.arange(20_000).astype('M8[s]'); np.rec.array([(1, 'a')] * 3000); np.ones((300, 300))[::2, ::3]; [np.arange(3)] * 2; {'a': np.ones(2)}
"""

PANDAS = """
pd.DataFrame(); pd.DataFrame({'a': [1, 2], 'b': ['x', 'y']}); pd.DataFrame({'a': range(50_000)}); pd.DataFrame({'a': [1, None]}); pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([('a', 'b'), ('a', 'c')])); pd.DataFrame({'a': [1]}, index=['r']); pd.DataFrame({'a': [[1], {2}]}); pd.DataFrame({'a': [1]}).rename_axis('row')
pd.Series([1, 2], name='n'); pd.Series(['a', None]); pd.Series([1, None], dtype='Int64'); pd.Series([True, None], dtype='boolean'); pd.Series(['a'], dtype='string'); pd.Series(['a', 'b'], dtype='category'); pd.Series(pd.date_range('2020', periods=3, tz='UTC')); pd.Series([1.5], dtype='Float32'); pd.Series([1, 2], dtype='int64[pyarrow]'); pd.Series([pd.Timedelta(1)]); pd.Series(pd.arrays.SparseArray([0, 0, 1])); pd.Series(range(30_000), dtype='f4')
pd.Index([1, 2]); pd.Index(['a']); pd.RangeIndex(2, 9, 3); pd.MultiIndex.from_product([[1, 2], 'ab'], names=['x', 'y']); pd.DatetimeIndex(['2020-01-01']); pd.date_range('2020', periods=3, freq='MS'); pd.period_range('2020', periods=3, freq='M'); pd.timedelta_range('1h', periods=2); pd.CategoricalIndex(['a']); pd.interval_range(0, 3); pd.Index([], dtype=object)
pd.Timestamp('2020-01-01', tz='Europe/Rome'); pd.Timestamp.max; pd.NaT; pd.NA; pd.Timedelta('1h'); pd.Period('2020-01'); pd.Interval(0, 1, 'both'); pd.offsets.MonthEnd(2); pd.offsets.BDay(); pd.offsets.Hour(3); pd.Categorical(['a', 'b'], ordered=True); pd.arrays.IntervalArray.from_breaks([0, 1]); pd.array([1, None]); pd.array(['a']); pd.arrays.SparseArray([0, 1])
pd.CategoricalDtype(['a']); pd.DatetimeTZDtype(tz='UTC'); pd.Int64Dtype(); pd.StringDtype(); pd.PeriodDtype('M'); pd.IntervalDtype('int64'); pd.SparseDtype('i8'); pd.ArrowDtype(pa.int64()); pd.DataFrame; pd.read_csv; pd.Grouper(key='a'); pd.NamedAgg('a', 'sum'); pd.IndexSlice[1:2]
pd.DataFrame({'a': [1, 1]}).groupby('a'); pd.Series([1, 2]).rolling(2); pd.DataFrame({'a': [1]}).style; pd.DataFrame({'a': [1]}).loc; pd.DataFrame({'a': [1]}).iterrows(); pd.Series(['a']).str; pd.Series([1]).plot; pd.ExcelFile; pd.io.json.ujson_dumps; pd.Series([1]).items; pd.errors.EmptyDataError('x'); pd.Flags
"""

POLARS = """
pl.DataFrame(); pl.DataFrame({'a': [1, 2], 'b': ['x', None]}); pl.DataFrame({'a': range(50_000)}); pl.DataFrame({'o': pl.Series([{1}, None], dtype=pl.Object)}); pl.DataFrame({'a': [[1], [2, 3]]}); pl.DataFrame({'s': [{'x': 1, 'y': 'a'}]}); pl.DataFrame(schema={'a': pl.Int8, 'b': pl.Categorical}); pl.concat([pl.DataFrame({'a': [1]}), pl.DataFrame({'a': [2]})], rechunk=False)
pl.Series('a', [1, None]); pl.Series([1.5], dtype=pl.Float32); pl.Series(['a', 'b'], dtype=pl.Categorical); pl.Series(['a'], dtype=pl.Enum(['a', 'b'])); pl.Series([True]); pl.Series([datetime.date(2020, 1, 1)]); pl.Series([datetime.datetime(2020, 1, 1)]); pl.Series([datetime.timedelta(1)]); pl.Series([datetime.time(1)]); pl.Series([b'a']); pl.Series([[1], None]); pl.Series([{'a': 1}]); pl.Series([None]); pl.Series([decimal.Decimal('1.5')]); pl.Series([1], dtype=pl.UInt8); pl.Series([C()], dtype=pl.Object); pl.Series('e', [], dtype=pl.String); pl.Series([[1, 2]], dtype=pl.Array(pl.Int8, 2)); pl.Series(range(30_000)); pl.Series([datetime.datetime(2020, 1, 1)]).dt.replace_time_zone('Europe/Rome'); pl.Series([1]).set_sorted()
pl.DataFrame({'a': [1]}).lazy(); pl.LazyFrame({'a': [1]}).filter(pl.col('a') > 0); pl.col('a'); pl.col('a').sum().over('b'); pl.lit(3); pl.when(True).then(1).otherwise(2); pl.selectors.numeric(); pl.col('a').map_elements(len); pl.DataFrame({'a': [1]}).group_by('a'); pl.DataFrame({'a': [1]}).iter_rows(); pl.DataFrame({'a': [1]}).schema; pl.Schema({'a': pl.Int8}); pl.Config; pl.StringCache; pl.SQLContext()
pl.Int64; pl.Int64(); pl.List(pl.Int8); pl.Struct({'a': pl.Int8}); pl.Datetime('us', 'UTC'); pl.Enum(['a']); pl.Categorical(); pl.Decimal(10, 2); pl.Array(pl.Int8, 3); pl.Field('a', pl.Int8); pl.Object; pl.read_csv; pl.exceptions.ColumnNotFoundError('a'); pl.DataFrame
pa.array([1, None]); pa.array(['a']); pa.table({'a': [1, 2]}); pa.chunked_array([[1], [2]]); pa.record_batch({'a': [1]}); pa.schema([('a', pa.int64())]); pa.int64(); pa.list_(pa.string()); pa.scalar(3); pa.py_buffer(b'abc'); pa.field('a', pa.int8()); pa.array(['a', 'b']).dictionary_encode(); pa.default_memory_pool(); pa.table({'a': range(30_000)})
"""

TORCH = """
torch.ones(3); torch.tensor(3.0); torch.zeros(0, 3); torch.arange(100_000); torch.ones(3, 4).T; torch.ones(6)[::2]; torch.ones(1, 3).expand(4, 3); torch.ones(3, requires_grad=True); torch.ones(2, 3).to(memory_format=torch.contiguous_format); torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last); torch.complex(torch.ones(2), torch.ones(2)).conj(); -torch.ones(2, dtype=torch.complex64).imag
torch.ones(3, dtype=torch.float16); torch.ones(3, dtype=torch.bfloat16); torch.ones(3, dtype=torch.float64); torch.ones(3, dtype=torch.int8); torch.ones(3, dtype=torch.uint8); torch.ones(3, dtype=torch.int16); torch.ones(3, dtype=torch.uint16); torch.ones(3, dtype=torch.uint32); torch.ones(3, dtype=torch.uint64); torch.ones(3, dtype=torch.bool); torch.ones(3, dtype=torch.complex128); torch.ones(3).to(torch.float8_e4m3fn); torch.ones(3).to(torch.float8_e5m2); torch.ones(20_000).to(torch.float8_e5m2); torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
torch.eye(3).to_sparse(); torch.eye(3).to_sparse_csr(); torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]); torch.ones(3, device='meta'); nn.Parameter(torch.ones(2)); nn.Parameter(torch.ones(2), False); nn.UninitializedParameter(); nn.Buffer(torch.ones(2)); torch.ones(3).storage(); torch.ones(3).untyped_storage(); torch.Size([1, 2]); torch.float32; torch.strided; torch.contiguous_format; torch.device('cpu'); torch.device('meta'); torch.Generator().manual_seed(3); torch.finfo(torch.float32); torch.get_rng_state()
nn.Linear(2, 3); nn.Sequential(nn.Linear(2, 3), nn.ReLU()); nn.LSTM(2, 3); nn.Embedding(5, 2); nn.EmbeddingBag(5, 2); nn.BatchNorm1d(3); nn.Conv2d(1, 2, 3); nn.TransformerEncoderLayer(4, 2, batch_first=True); nn.ModuleDict({'a': nn.Linear(1, 1)}); nn.ModuleList([nn.Linear(1, 1)]); nn.ParameterList([torch.ones(2)]); nn.CrossEntropyLoss(torch.ones(3)); nn.Dropout(0.3); nn.LazyLinear(3); nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)); nn.Linear(2, 2).state_dict(); nn.Linear(2, 2).forward; nn.Linear(2, 2).parameters(); nn.functional.relu; nn.init.zeros_
torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1); torch.optim.Adam(nn.Linear(2, 2).parameters()); torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1), 3); torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1), 1.0, 9); torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1)); torch.amp.GradScaler('cpu', enabled=False); torch.amp.autocast('cpu'); torch.no_grad(); torch.autograd.Function; torch.ones(2, requires_grad=True) * 2
torch.utils.data.TensorDataset(torch.ones(3)); torch.utils.data.DataLoader([1, 2]); torch.utils.data.Subset([1, 2], [0]); torch.utils.data.ConcatDataset([[1], [2]]); torch.utils.data.RandomSampler([1, 2]); torch.utils.data.DistributedSampler([1, 2], 2, 0); iter(torch.utils.data.DataLoader([1, 2])); torch.distributions.Normal(torch.zeros(2), torch.ones(2)); torch.distributions.Categorical(torch.ones(3)); torch.jit.script(nn.Linear(2, 2)); torch.compile(nn.Linear(1, 1)); torch.fx.symbolic_trace(nn.Linear(1, 1)); torch.profiler.profile(); torch.futures.Future(); torch.Stream; torch.save; torch.nn; torch.return_types.max; torch.max(torch.ones(2, 2), 1)
"""

SKLEARN = """
linear_model.LinearRegression(); linear_model.LinearRegression().fit(X, y); linear_model.LogisticRegression().fit(X, y); linear_model.Ridge(2.0).fit(X, y); linear_model.SGDClassifier(random_state=0).fit(X, y); linear_model.LassoCV(cv=2).fit(X, y); ensemble.RandomForestClassifier(3, random_state=0).fit(X, y); ensemble.GradientBoostingRegressor(n_estimators=3, random_state=0).fit(X, y); ensemble.HistGradientBoostingClassifier(max_iter=3).fit(X, y); ensemble.IsolationForest(n_estimators=3, random_state=0).fit(X); tree.DecisionTreeClassifier().fit(X, y); neighbors.KNeighborsClassifier(1).fit(X, y); neighbors.KDTree(X); neighbors.BallTree(X)
svm.SVC().fit(X, y); svm.LinearSVC().fit(X, y); naive_bayes.GaussianNB().fit(X, y); cluster.KMeans(2, n_init=1, random_state=0).fit(X); cluster.DBSCAN().fit(X); decomposition.PCA(1).fit(X); decomposition.TruncatedSVD(1).fit(X); decomposition.NMF(1).fit(np.abs(X)); preprocessing.StandardScaler().fit(X); preprocessing.OneHotEncoder().fit(X); preprocessing.LabelEncoder().fit(['a', 'b']); preprocessing.MinMaxScaler().fit(X); preprocessing.PolynomialFeatures().fit(X); preprocessing.FunctionTransformer(np.log1p); preprocessing.FunctionTransformer(lambda x: x); preprocessing.QuantileTransformer(3).fit(X)
feature_extraction.text.CountVectorizer().fit(['a bc bc']); feature_extraction.text.TfidfVectorizer().fit(['a bc bc']); feature_extraction.DictVectorizer().fit([{'a': 1}]); impute.SimpleImputer().fit(X); pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.Ridge()).fit(X, y); compose.ColumnTransformer([('a', 'passthrough', [0])]).fit(X); model_selection.KFold(3); model_selection.GridSearchCV(linear_model.Ridge(), {'alpha': [1, 2]}, cv=2).fit(X, y); model_selection.ParameterGrid({'a': [1]}); model_selection.train_test_split; gaussian_process.GaussianProcessRegressor().fit(X, y); gaussian_process.kernels.RBF(2.0); neural_network.MLPClassifier(3, max_iter=3, random_state=0).fit(X, y); metrics.make_scorer(metrics.f1_score); calibration.CalibratedClassifierCV(cv=2).fit(X, y); multioutput.MultiOutputRegressor(linear_model.Ridge()).fit(X, X)
scipy.sparse.csr_matrix(np.eye(3)); scipy.sparse.coo_array(np.eye(3)); scipy.sparse.dok_matrix(np.eye(2)); scipy.sparse.csr_array(np.eye(300)); scipy.stats.norm(1, 2); scipy.stats.norm; scipy.interpolate.CubicSpline([0, 1, 2], [0, 1, 0]); scipy.spatial.cKDTree(X); scipy.spatial.transform.Rotation.identity(); scipy.optimize.OptimizeResult(x=1); scipy.optimize.LinearConstraint([1], 0, 1); scipy.special.expit; scipy.spatial.ConvexHull(X); scipy.interpolate.interp1d([0, 1], [0, 1])
"""

LIBRARIES = {
    "standard library": STANDARD,
    "numpy": NUMPY,
    "pandas": PANDAS,
    "polars and pyarrow": POLARS,
    "torch": TORCH,
    "scikit-learn and scipy": SKLEARN,
}
PAGE = Path(__file__).parents[2] / "docs" / "objects.md"


class C:
    def __eq__(self, other: Any) -> bool:
        return type(other) is C

    __hash__ = object.__hash__


def make() -> dict[str, dict[str, Any]]:
    """The objects of each library by the expressions that make them; those that this Python or release has."""
    import importlib

    space: dict[str, Any] = {"C": C, "__name__": "__main__"}
    texts = "\n".join(LIBRARIES.values())
    for name in sorted(set(re.findall(r"\b([a-z_]\w*(?:\.[a-z_]\w*)*)\.", texts))):
        for part in [name, name.rpartition(".")[0], name.partition(".")[0]]:
            if part and part not in ("pd", "pl", "np", "pa"):
                try:
                    importlib.import_module(part)
                    space[part.partition(".")[0]] = sys.modules[part.partition(".")[0]]
                except Exception:
                    continue
    import numpy as np
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    import scipy.interpolate, scipy.optimize, scipy.sparse, scipy.spatial, scipy.special, scipy.stats
    import sklearn
    from torch import nn
    import torch.utils.data

    class Signal(np.ndarray):
        def __new__(cls, data: Any, rate: Any) -> Any:
            made = np.asarray(data).view(cls)
            made.rate = rate
            return made

    for name in re.findall(r"\b([a-z_]+)\.", SKLEARN):
        try:
            space[name] = importlib.import_module(f"sklearn.{name}")
        except ImportError:
            continue
    importlib.import_module("sklearn.feature_extraction.text")
    importlib.import_module("sklearn.gaussian_process.kernels")
    rng = np.random.default_rng(0)
    space.update(np=np, pd=pd, pl=pl, pa=pa, nn=nn, scipy=scipy, torch=torch, Signal=Signal)
    space.update(X=rng.random((20, 2)), y=np.arange(20) % 2)
    made: dict[str, dict[str, Any]] = {}
    for library, text in LIBRARIES.items():
        made[library] = {}
        for expression in re.split(r"; (?![^(\[{]*[)\]}])|\n", text.strip()):
            try:
                made[library][expression] = eval(expression, space)
            except Exception as exc:
                made[library][expression] = Absent(exc)
    return made


class Absent:
    """Cases that this Python, or this release of a library, does not have."""

    def __init__(self, why: Exception) -> None:
        self.why = why


def refused(obj: Any) -> str:
    """Why `obj` is refused; empty if it is sent."""
    from nbdist import CaptureError
    from nbdist.capture.call import capture_call
    from nbdist.wire.cache import SentCache

    try:
        capture_call(len, (obj,), {}, "", {}, SentCache(), False).parcel.close()
    except CaptureError as exc:
        assert str(exc).startswith("argument 1"), exc
        return str(exc)
    return ""


def there_and_back(obj: Any) -> Any:
    """`obj` as a reader gets it."""
    import io

    from nbdist.capture.pickler import Pickler
    from nbdist.capture.reading import read
    from nbdist.wire.parcel import pack

    pickler = Pickler(io.BytesIO())
    pickler.dump(obj)
    parcel = pack(pickler.file.getbuffer(), pickler.buffers)
    return read(*parcel.open(), originals=[], keep=lambda key, namespace, name: True)


def same(a: Any, b: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Return whether two objects are of one type and hold the same, to the bottom."""
    import numpy as np
    import pandas as pd
    import polars as pl
    import torch

    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b) and type(a).__qualname__ != type(b).__qualname__:
        return False
    seen |= {(id(a), id(b))}

    def alike(x: Any, y: Any) -> bool:
        return same(x, y, seen)

    def states(x: Any, y: Any) -> bool:
        return alike(getattr(x, "__dict__", None), getattr(y, "__dict__", None))

    if isinstance(a, torch.nn.parameter.UninitializedTensorMixin):
        return states(a, b)
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.layout, a.device, a.requires_grad) != (b.dtype, b.layout, b.device, b.requires_grad):
            return False
        if a.device.type == "meta" or a.is_nested or a.layout is not torch.strided or a.is_quantized:
            return str(a) == str(b)
        return (
            a.shape == b.shape
            and a.stride() == b.stride()
            and str(a.isnan()) == str(b.isnan())
            and torch.equal(a.detach().to(torch.complex128), b.detach().to(torch.complex128))
        )
    if isinstance(a, np.ndarray):
        if (a.dtype, a.shape) != (b.dtype, b.shape) or not alike(a.tolist(), b.tolist()):
            return False
        return isinstance(a, np.memmap) or states(a, b)
    if isinstance(a, (pd.DataFrame, pd.Series, pd.Index)):
        return bool(a.equals(b)) and repr(a) == repr(b)
    if isinstance(a, (pl.DataFrame, pl.Series)):
        schema = a.schema if isinstance(a, pl.DataFrame) else a.dtype
        return schema == (b.schema if isinstance(b, pl.DataFrame) else b.dtype) and alike(
            a.to_dict() if isinstance(a, pl.DataFrame) else a.to_list(),
            b.to_dict() if isinstance(b, pl.DataFrame) else b.to_list(),
        )
    if isinstance(a, dict):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a.items(), b.items(), strict=True)) and states(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b)) and states(a, b)
    if isinstance(a, (float, np.floating)):
        return repr(a) == repr(b)
    if isinstance(a, types.FunctionType):
        return a.__code__ == b.__code__ and alike(a.__defaults__, b.__defaults__) and sorted(vars(a)) == sorted(vars(b))
    if isinstance(a, type):
        own = {k for k in vars(a) if not k.startswith("__")}
        return a.__qualname__ == b.__qualname__ and own == {k for k in vars(b) if not k.startswith("__")}
    if isinstance(a, (str, bytes)):
        return bool(a == b)
    if type(a).__name__ == "cKDTree":  # the first of its state are nodes, with their addresses
        return alike(a.__getstate__()[1:], b.__getstate__()[1:])
    try:
        if bool(a == b) or repr(a) == repr(b):
            return True
    except Exception:
        pass
    try:
        x, y = a.__reduce_ex__(4), b.__reduce_ex__(4)
    except Exception:
        return states(a, b) and re.sub("0x\\w+", "", repr(a)) == re.sub("0x\\w+", "", repr(b))
    if isinstance(x, str):
        return bool(x == y)
    return alike(*([*map(_in_any_order, z[:3]), *(list(i) if i is not None else None for i in z[3:5])] for z in (x, y)))


def _in_any_order(state: Any) -> Any:
    """The attributes of an object: those that need nothing arrive first."""
    return dict(sorted(state.items())) if type(state) is dict and all(isinstance(key, str) for key in state) else state


#: What arrives as something else, as in every pickle.
OTHERWISE = {
    "open('/dev/null')": "arrives as `io.StringIO` with the file's text",
    "iter({'a': 1})": "arrives as an iterator over a list",
    "iter({1})": "arrives as an iterator over a list",
    "pickle.PickleBuffer(b'a')": "arrives as `bytes`",
}


def rows() -> list[tuple[str, str, str]]:
    """Library, expression, and what becomes of the object: "arrives", or how, or "refused"."""
    found = []
    for library, objects in make().items():
        for expression, obj in objects.items():
            if isinstance(obj, Absent):
                continue
            fate = "refused"
            if not refused(obj):
                arrived = there_and_back(obj)
                fate = OTHERWISE.get(expression) or ("arrives" if same(obj, arrived) else "changed")
            found.append((library, expression, fate))
    return found


def page(table: list[tuple[str, str, str]]) -> str:
    """The table as a page of the docs."""
    count = sum(fate == "arrives" for _, _, fate in table)
    lines = [
        "# What travels",
        "",
        "After this page you know whether an object arrives in the ranks, and as what.",
        "",
        f"Each of these {len(table)} objects was sent as a call sends its arguments: {count} arrive equal, "
        f"{sum(fate == 'refused' for _, _, fate in table)} are refused with a `CaptureError` that names them, before any "
        "rank is asked. `python tests/capture/objects.py` makes this page, and a test compares it.",
    ]
    for library in LIBRARIES:
        lines += ["", f"## {library}", "", "| object | |", "|---|---|"]
        lines += [
            f"| `{what.replace('|', chr(92) + '|')}` | {fate} |" for where, what, fate in table if where == library
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    import warnings

    warnings.simplefilter("ignore")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(rows()))


if __name__ == "__main__":
    main()
