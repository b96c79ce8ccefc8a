"""Ratings: the synthetic ones hold what they promise, the real ones are found, fetched and refused as documented."""

from __future__ import annotations

import http.server
import io
import socket
import threading
import urllib.error
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.recsys import datasets
from nbdist.recsys.datasets import movielens_100k, synthetic_ratings

COLUMNS = ["user", "movie", "rating", "timestamp", "title"]
DATA = "1\t2\t5\t881250949\n2\t1\t3\t891717742\n1\t1\t1\t878887116\n"
ITEM = "1|Amélie's Kettle (1995)|01-Jan-1995||\n2|The Second Tide (1996)|01-Jan-1996||\n"


@pytest.fixture(autouse=True)
def away_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's own data, cache or proxy has a part in these tests. Returns the folder that is fastai's cache."""
    monkeypatch.delenv("NBDIST_DATA", raising=False)
    monkeypatch.setenv("FASTAI_HOME", str(tmp_path / "fastai"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "fastai" / "data"


def write(folder: Path, data: str = DATA, item: str = ITEM) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "u.data").write_text(data)
    (folder / "u.item").write_text(item, encoding="latin-1")
    return folder


def archive(**extra: str) -> bytes:
    """A zip file of a tiny ml-100k, and `extra` members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        opened.writestr("ml-100k/u.data", DATA)
        opened.writestr("ml-100k/u.item", ITEM.encode("latin-1"))
        for name, text in extra.items():
            opened.writestr(name, text)
    return buffer.getvalue()


class Server(http.server.ThreadingHTTPServer):
    """Answers every request with `body`, or with 404 when there is none; `cut` bytes short of what it announced."""

    body: bytes | None = None
    cut = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/ml-100k.zip"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.server.body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body[: len(self.server.body) - self.server.cut])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    users, items = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    return users, items, draw(st.integers(max(users, items), users * items))


# --- synthetic ratings ---


@given(sizes(), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_synthetic_has_the_shape_asked_for_and_covers_everyone_once(size: tuple[int, int, int], seed: int) -> None:
    users, items, ratings = size
    frame = synthetic_ratings(users, items, ratings, seed=seed)
    assert list(frame.columns) == COLUMNS and len(frame) == ratings
    assert not frame.duplicated(["user", "movie"]).any()
    assert set(frame.user) == set(range(1, users + 1))
    assert set(frame.movie) == set(range(1, items + 1))
    assert frame.rating.between(1, 5).all()
    assert frame.groupby("movie").title.nunique().eq(1).all() and frame.title.nunique() == items


@given(st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_synthetic_is_reproducible_and_seeds_differ(seed: int) -> None:
    frame = synthetic_ratings(20, 30, 200, seed=seed)
    pd.testing.assert_frame_equal(frame, synthetic_ratings(20, 30, 200, seed=seed))
    assert not frame.equals(synthetic_ratings(20, 30, 200, seed=seed + 1))


def test_synthetic_leaves_the_global_generator_alone() -> None:
    np.random.seed(0)
    before = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    synthetic_ratings(5, 5, 10)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]


@pytest.mark.parametrize("size", [(0, 5, 5), (5, 0, 5), (5, 9, 8), (3, 3, 10)])
def test_synthetic_refuses_impossible_sizes(size: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        synthetic_ratings(*size)


def test_synthetic_titles_stay_unique_beyond_the_word_lists() -> None:
    assert synthetic_ratings(1, 6000, 6000).title.nunique() == 6000


def test_synthetic_has_a_long_tail() -> None:
    counts = synthetic_ratings().movie.value_counts()
    assert counts.iloc[: len(counts) // 10].sum() > 0.3 * counts.sum()
    assert counts.iloc[len(counts) // 2 :].sum() < 0.2 * counts.sum()


@pytest.mark.parametrize("seed", [42, 7])
def test_a_learnt_model_beats_the_mean(seed: int) -> None:
    """Alternating least squares on four fifths predicts the rest with at most 0.65 of the mean's squared error."""
    frame = synthetic_ratings(seed=seed)
    user, movie = frame.user.to_numpy() - 1, frame.movie.to_numpy() - 1
    rating = frame.rating.to_numpy(dtype=float)
    valid = np.random.default_rng(0).random(len(frame)) < 0.2
    predicted = least_squares(user[~valid], movie[~valid], rating[~valid])[user[valid], movie[valid]]
    error, variance = np.mean((predicted - rating[valid]) ** 2), rating[valid].var()
    assert error < 0.65 * variance


def least_squares(
    user: np.ndarray, movie: np.ndarray, rating: np.ndarray, rank: int = 4, rounds: int = 6
) -> np.ndarray:
    """Biases and `rank` factors by alternating ridge regressions; every prediction, (n_users, n_movies)."""
    mean = rating.mean()
    # Each side is [factors, own bias, 1]: the 1 meets the other side's bias.
    rng = np.random.default_rng(0)
    sides = [rng.normal(0, 0.1, (index.max() + 1, rank + 1)) for index in (user, movie)]
    for _ in range(rounds):
        for this, that, mine, other in ((0, 1, user, movie), (1, 0, movie, user)):
            inputs = np.c_[sides[that][other, :rank], np.ones(len(rating))]  # (n, rank + 1)
            target = rating - mean - sides[that][other, rank]  # (n,)
            n = len(sides[this])
            gram, moment = np.zeros((n, rank + 1, rank + 1)), np.zeros((n, rank + 1))
            np.add.at(gram, mine, inputs[:, :, None] * inputs[:, None, :])
            np.add.at(moment, mine, inputs * target[:, None])
            sides[this] = np.linalg.solve(gram + 6.0 * np.eye(rank + 1), moment[:, :, None])[:, :, 0]
    users, movies = sides
    return mean + users[:, :rank] @ movies[:, :rank].T + users[:, [rank]] + movies[:, rank]


# --- from a folder ---


def test_a_folder_is_read(tmp_path: Path) -> None:
    frame, source = movielens_100k(write(tmp_path / "here"))
    assert str(tmp_path / "here") in source
    assert frame.user.tolist() == [1, 2, 1] and frame.rating.tolist() == [5, 3, 1]
    assert frame.title.tolist() == ["The Second Tide (1996)"] + ["Amélie's Kettle (1995)"] * 2
    assert list(frame.columns) == COLUMNS
    assert frame.dtypes.to_dict() == synthetic_ratings(3, 3, 3).dtypes.to_dict()


def test_the_look_up_order(tmp_path: Path, away_from_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = write(away_from_home / "ml-100k")
    assert str(cached) in movielens_100k(download=False).source
    write(tmp_path / "data" / "ml-100k")
    monkeypatch.setenv("NBDIST_DATA", str(tmp_path / "data"))
    assert str(tmp_path / "data" / "ml-100k") in movielens_100k().source
    assert str(tmp_path / "own") in movielens_100k(write(tmp_path / "own")).source


def test_fastai_may_keep_its_data_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "fastai").mkdir()
    (tmp_path / "fastai" / "config.ini").write_text(f"[DEFAULT]\ndata = {tmp_path / 'big disk'}\n")
    write(tmp_path / "big disk" / "ml-100k")
    assert "big disk" in movielens_100k(download=False).source


def test_a_folder_without_the_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "u.data").write_text(DATA)
    with pytest.raises(FileNotFoundError, match=r"u\.data and u\.item"):
        movielens_100k(tmp_path)
    monkeypatch.setenv("NBDIST_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"NBDIST_DATA.*nowhere"):
        movielens_100k()


def test_nothing_on_disk_and_no_download_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="download=False"):
        movielens_100k(download=False)


@pytest.mark.parametrize(
    ("data", "item", "message"),
    [
        ("1\t2\t5\n", ITEM, r"u\.data"),
        ("1\t2\tfive\t8\n", ITEM, r"u\.data"),
        (DATA + "1\t2\n", ITEM, r"u\.data"),
        ("1\t2\t6\t8\n", ITEM, r"u\.data.*1\.\.5"),
        ("", ITEM, r"u\.data"),
        (DATA, "1|A\n", r"u\.item.*no title.* 2$"),
        (DATA, "one|A\n", r"u\.item, line 1"),
        (DATA, ITEM + "3\n", r"u\.item, line 3"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, data: str, item: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        movielens_100k(write(tmp_path, data, item))


# --- from the network ---


def test_a_download_is_kept(server: Server, away_from_home: Path) -> None:
    server.body = archive(**{"ml-100k/README": "hello"})
    frame, source = movielens_100k(url=server.url)
    assert len(frame) == 3 and server.url in source
    assert (away_from_home / "ml-100k" / "README").read_text() == "hello"
    assert [entry.name for entry in away_from_home.iterdir()] == ["ml-100k"]
    server.body = None
    assert "cache" in movielens_100k(url=server.url).source


def test_a_download_completes_an_unfinished_folder(server: Server, away_from_home: Path) -> None:
    (away_from_home / "ml-100k").mkdir(parents=True)
    (away_from_home / "ml-100k" / "u.data").write_text("1\t")
    server.body = archive()
    assert len(movielens_100k(url=server.url).frame) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>Please log in</html>", "not a usable zip"),
        (archive()[:-30], "not a usable zip"),
        (archive(**{"../../escaped": "x"}), "leads outside"),
        (archive(**{"/tmp/escaped": "x"}), "leads outside"),
        (archive(**{"ml-100k\\..\\escaped": "x"}), "leads outside"),
        (archive().replace(b"u.item", b"u.atem"), "has no ml-100k/u.data"),
    ],
)
def test_a_bad_archive_is_refused(
    server: Server, away_from_home: Path, tmp_path: Path, body: bytes, message: str
) -> None:
    server.body = body
    with pytest.raises(ValueError, match=message):
        movielens_100k(url=server.url)
    assert list(away_from_home.iterdir()) == [] and not list(tmp_path.rglob("escaped"))


def test_an_answer_with_an_error_is_raised_and_not_replaced(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        movielens_100k(url=server.url)


def test_a_download_that_breaks_off_is_raised_and_not_replaced(server: Server) -> None:
    server.body, server.cut = archive(), 10
    with pytest.raises(ConnectionError, match="broke off"):
        movielens_100k(url=server.url)


def test_only_web_addresses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http"):
        movielens_100k(url=(tmp_path / "x.zip").as_uri())


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nothing listens at: bound, so that nobody else can take it meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_offline_falls_back_and_says_so(closed_port: int, away_from_home: Path) -> None:
    with pytest.warns(UserWarning, match="NOT MovieLens.*could not be reached"):
        frame, source = movielens_100k(url=f"http://127.0.0.1:{closed_port}/ml-100k.zip")
    assert "Synthetic" in source and "NBDIST_DATA" in source
    assert len(frame) == 100_000 and not away_from_home.exists()


def test_no_name_server_counts_as_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    monkeypatch.setattr(datasets, "synthetic_ratings", lambda: pd.DataFrame())
    for proxy in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "Synthetic" in movielens_100k().source
    assert len(caught) == 1 and caught[0].filename == __file__
