"""MovieLens is found, fetched, read and refused as documented; without a network it is said plainly."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
import socket
import warnings
import zipfile
from pathlib import Path

import polars as pl
import pytest
from test_download import Server, closed_port, server  # noqa: F401 (fixtures)

from nbdist.recsys.datasets import Ratings, movielens, synthetic_ratings
from nbdist.recsys.datasets import grouplens as datasets
from nbdist.recsys.datasets.grouplens import EDITIONS

FLAGS = "|0|1|0|0|1" + "|0" * 14  # Action, Children's
UNKNOWN = "|1" + "|0" * 18
FILES = {
    "100k": {
        "u.data": "1\t2\t5\t881250949\n2\t1\t3\t891717742\n1\t1\t1\t878887116\n",
        "u.item": f"1|Amélie's Kettle (1995)|01-Jan-1995||http://x{FLAGS}\n2|unknown||||{UNKNOWN[1:]}\n",
    },
    "1m": {
        "ratings.dat": "1::2::5::978300760\n2::1::3::978302109\n1::1::1::978301968\n",
        "movies.dat": "1::Amélie's \"Kettle\": Two (1995)::Action|Children's\n2::unknown (1996)::\n",
    },
    "25m": {
        "ratings.csv": "userId,movieId,rating,timestamp\n1,2,5.0,1147880044\n2,1,3.5,1147868817\n1,1,0.5,1147868828\n",
        "movies.csv": 'movieId,title,genres\n1,"Amélie\'s ""Kettle"", Two (1995)",Action|Children\'s\n'
        "2,unknown (1996),(no genres listed)\n",
    },
}
FILES |= {name: FILES["25m"] for name in ("20m", "32m", "latest-small")} | {"10m": FILES["1m"]}
ENCODING = {name: "latin-1" if name in ("100k", "1m") else "utf-8" for name in FILES}
NAMES = list(FILES)


@pytest.fixture(autouse=True)
def away_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Data, cache and proxy of the user have no part in these tests, and the sets have 3 ratings each. Returns the
    folder that is fastai's cache."""
    monkeypatch.delenv("NBDIST_DATA", raising=False)
    monkeypatch.setenv("FASTAI_HOME", str(tmp_path / "fastai"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for name, edition in EDITIONS.items():
        digest = None if edition.md5 is None else hashlib.md5(archive(name)).hexdigest()
        small = dataclasses.replace(edition, users=2, movies=2, ratings=3, md5=digest)
        monkeypatch.setitem(EDITIONS, name, small)
    return tmp_path / "fastai" / "data"


def write(folder: Path, name: str = "100k", **changed: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in FILES[name].items():
        (folder / file).write_text(changed.get(file.replace(".", "_"), text), encoding=ENCODING[name])
    return folder


def archive(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for file, text in FILES[name].items():
            member = zipfile.ZipInfo(f"{EDITIONS[name].folder}/{file}", (2020, 1, 1, 0, 0, 0))
            opened.writestr(member, text.encode(ENCODING[name]))
    return buffer.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_read(tmp_path: Path, name: str) -> None:
    ratings, movies, source = movielens(name, write(tmp_path / "here", name))
    assert source == f"MovieLens {name} from the folder {tmp_path / 'here'}."
    assert ratings["user"].to_list() == [1, 2, 1] and ratings["movie"].to_list() == [2, 1, 1]
    assert ratings["rating"].to_list() == ([5, 3.5, 0.5] if "ratings.csv" in FILES[name] else [5, 3, 1])
    lines = [line for line in next(iter(FILES[name].values())).splitlines() if line[0].isdigit()]
    assert ratings["timestamp"].to_list() == [int(re.split(r"\D+", line)[-1]) for line in lines]
    assert movies["movie"].to_list() == [1, 2]
    assert movies["title"].to_list()[0].startswith("Amélie's ") and movies["title"].to_list()[1].startswith("unknown")
    assert movies["genres"].to_list() == [["Action", "Children's"], []]
    invented = synthetic_ratings(3, 3, 3)
    assert ratings.schema == invented.frame.schema and movies.schema == invented.movies.schema


def test_titles_with_bars_quotes_and_colons(tmp_path: Path) -> None:
    titles = [movielens(name, write(tmp_path / name, name)).movies["title"][0] for name in ("1m", "25m")]
    assert titles == ['Amélie\'s "Kettle": Two (1995)', 'Amélie\'s "Kettle", Two (1995)']


def test_titles_are_joined_to_ratings(tmp_path: Path) -> None:
    data = movielens("100k", write(tmp_path))
    frame = data.with_titles()
    assert frame.columns == ["user", "movie", "rating", "timestamp", "title"]
    assert frame["title"].to_list() == ["unknown", "Amélie's Kettle (1995)", "Amélie's Kettle (1995)"]
    assert frame.drop("title").equals(data.frame)


def test_the_look_up_order(tmp_path: Path, away_from_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = write(away_from_home / "ml-100k")
    assert str(cached) in movielens(download=False).source
    write(tmp_path / "data" / "ml-100k")
    monkeypatch.setenv("NBDIST_DATA", str(tmp_path / "data"))
    assert str(tmp_path / "data" / "ml-100k") in movielens().source
    assert str(tmp_path / "own") in movielens("100k", write(tmp_path / "own")).source


def test_fastai_may_keep_its_data_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "fastai").mkdir()
    (tmp_path / "fastai" / "config.ini").write_text(f"[DEFAULT]\ndata = {tmp_path / 'big disk'}\n")
    write(tmp_path / "big disk" / "ml-25m", "25m")
    assert "big disk" in movielens("25m", download=False).source


def test_a_folder_without_the_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "u.data").write_text(FILES["100k"]["u.data"])
    with pytest.raises(FileNotFoundError, match=r"u\.data and u\.item"):
        movielens("100k", tmp_path)
    monkeypatch.setenv("NBDIST_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"NBDIST_DATA.*nowhere"):
        movielens("1m")


def test_no_file_and_no_download_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"ratings\.csv and movies\.csv in .*download=False"):
        movielens("25m", download=False)


def test_an_unknown_set_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'5m' is not a MovieLens set.*100k, 1m, 10m"):
        movielens("5m")


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("100k", {"u_data": "1\t2\t5\n" * 3}, r"u\.data: not lines of user, movie, rating, timestamp"),
        ("100k", {"u_data": "1\t2\t5\t8\n1\t2\n1\t1\t5\t8\n"}, r"u\.data: some lines have fewer"),
        ("100k", {"u_data": "1\t2\tfive\t8\n" * 3}, r"u\.data: not lines of user, movie, rating, timestamp"),
        ("100k", {"u_data": "1\t2\t5\t8\t9\n" * 3}, r"u\.data: not lines"),
        ("100k", {"u_data": "1\t2\t6\t8\n" * 3}, r"u\.data: ratings outside 0\.5\.\.5"),
        ("100k", {"u_data": ""}, r"u\.data has 0 ratings"),
        ("100k", {"u_data": "1\t2\t5\t8\n" * 4}, r"u\.data has 4 ratings, MovieLens 100k has 3: .*Remove"),
        ("100k", {"u_item": f"1|A|||{FLAGS}\n"}, r"u\.item: no title for 1 rated movies, the first of them 2$"),
        ("100k", {"u_item": f"one|A|||{FLAGS}\n"}, r"u\.item: not lines of 24 columns"),
        ("1m", {"ratings_dat": "1:2:5:8\n" * 3}, r"ratings\.dat"),
        ("1m", {"movies_dat": "1::A::B\n2\n"}, r"movies\.dat: some lines"),
        ("1m", {"movies_dat": "1::A::B\n1::C::B\n2::D::B\n"}, r"movies\.dat: some lines"),
        ("25m", {"movies_csv": "movieId,title,genres\n1,A,B\n"}, r"movies\.csv: no title for 1"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, name: str, changed: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        movielens(name, write(tmp_path, name, **changed))


@pytest.mark.parametrize("name", NAMES)
def test_a_download_is_kept(server: Server, away_from_home: Path, name: str) -> None:  # noqa: F811
    server.body, server.cuts = archive(name), [100]
    data = movielens(name, url=server.url)
    assert isinstance(data, Ratings) and data.frame.height == 3 and server.url in data.source
    assert [entry.name for entry in away_from_home.iterdir()] == [EDITIONS[name].folder]
    server.body = None
    assert "cache" in movielens(name, url=server.url).source


def test_another_file_than_grouplens_publishes_is_refused(server: Server) -> None:  # noqa: F811
    server.body = archive("1m")
    with pytest.raises(ValueError, match="MD5 sum"):
        movielens("100k", url=server.url, synthetic=True)


def test_offline_is_a_plain_error(closed_port: int, away_from_home: Path) -> None:  # noqa: F811
    with pytest.raises(ConnectionError, match=r"could not be reached.*NBDIST_DATA.*u\.data.*synthetic=True"):
        movielens(url=f"http://127.0.0.1:{closed_port}/ml-100k.zip")
    assert list(away_from_home.iterdir()) == []


def test_offline_falls_back_to_synthetic_ratings_with_a_warning(closed_port: int) -> None:  # noqa: F811
    with pytest.warns(UserWarning, match="NOT MovieLens.*could not be reached"):
        data = movielens(url=f"http://127.0.0.1:{closed_port}/ml-100k.zip", synthetic=True)
    assert data.source.startswith("Synthetic") and "NBDIST_DATA" in data.source
    assert data.frame.height == 3


def test_no_name_server_counts_as_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    empty = Ratings(pl.DataFrame(), pl.DataFrame(), "")
    monkeypatch.setattr(datasets, "synthetic_ratings", lambda *size: empty)
    for proxy in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "Synthetic" in movielens("25m", synthetic=True).source
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("name", ["100k", "1m", "10m", "25m"])
def test_a_part_of_a_data_set_is_used_with_a_warning(tmp_path: Path, name: str, away_from_home: Path) -> None:
    file = EDITIONS[name].files[0]
    text = "".join(FILES[name][file].splitlines(keepends=True)[:-1])
    folder = write(tmp_path / "own", name, **{file.replace(".", "_"): text})
    with pytest.warns(UserWarning, match="2 of 3 ratings"):
        data = movielens(name, folder)
    assert data.frame.height == 2 and "2 of 3 ratings" in data.source
    write(away_from_home / EDITIONS[name].folder, name, **{file.replace(".", "_"): text})
    with pytest.raises(ValueError, match="not all of it was downloaded"):
        movielens(name, download=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("encoding", ["latin-1", "utf-8", "utf-8-sig"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_files_saved_by_other_programs_are_read(tmp_path: Path, name: str, encoding: str, newline: str) -> None:
    """By a program that writes UTF-8, with a byte order mark or without, or ends lines as Windows does."""
    folder = write(tmp_path, name)
    file = EDITIONS[name].files[1]
    (folder / file).write_bytes(FILES[name][file].replace("\n", newline).encode(encoding))
    _, movies, _ = movielens(name, folder)
    assert movies["title"][0].startswith("Amélie's ") and movies["genres"].to_list() == [["Action", "Children's"], []]


def test_columns_of_csv_are_found_by_their_names(tmp_path: Path) -> None:
    """Files that pandas saved with its index, or in another order; without names the first row would be lost."""
    folder = write(tmp_path / "here", "25m")
    expected = movielens("25m", folder)
    ratings, movies = folder / "ratings.csv", folder / "movies.csv"
    pl.read_csv(ratings).with_row_index("").select("", "movieId", "timestamp", "rating", "userId").write_csv(ratings)
    pl.read_csv(movies).select("genres", "movieId", "title").write_csv(movies)
    found = movielens("25m", folder)
    assert found.frame.equals(expected.frame) and found.movies.equals(expected.movies)
    for file, names in ((ratings, "userId, movieId, rating, timestamp"), (movies, "movieId, title, genres")):
        kept = file.read_text(encoding="utf-8")
        file.write_text(kept.partition("\n")[2], encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{file.name}: the first line must name {names}, but it lacks"):
            movielens("25m", folder)
        file.write_text(kept, encoding="utf-8")


def test_quotation_marks_of_windows(tmp_path: Path) -> None:
    folder = write(tmp_path / "here", "100k")
    text = (folder / "u.item").read_text(encoding="latin-1")
    (folder / "u.item").write_text(text.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}"), encoding="cp1252")
    assert movielens("100k", folder).movies["title"][0].startswith("Amélie\N{RIGHT SINGLE QUOTATION MARK}s")
