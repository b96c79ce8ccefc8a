"""The MovieLens sets that GroupLens publishes, from a folder or the network."""

from __future__ import annotations

import configparser
import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from .download import Unreachable, fetch_folder, holds
from .ratings import GENRES, SCHEMA, Ratings
from .synthetic import synthetic_ratings

_URL = "https://files.grouplens.org/datasets/movielens/{}.zip"


@dataclass(frozen=True)
class Edition:
    """A set that GroupLens publishes."""

    folder: str
    """The name of the folder in the archive."""
    md5: str | None
    """The archive's checksum, as GroupLens publishes it (`_URL` + ".md5"). None: the archive is replaced at times."""
    users: int
    movies: int
    """The number of movies that have ratings."""
    ratings: int
    files: tuple[str, str]
    """The files with the ratings and with the movies."""
    read: Callable[[Path, Path], tuple[pl.DataFrame, pl.DataFrame]]
    """The function that makes frames of these files."""
    archive: str = ""
    """The archive's name, if it is not the folder's."""


def movielens(
    name: str = "100k",
    path: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    synthetic: bool = False,
    url: str | None = None,
) -> Ratings:
    """Load a MovieLens set: every rating, in the order of its file, and every movie with title and genres.

    The first existing source is used: `path`; the folder in the environment variable ``NBDIST_DATA``; fastai's cache
    (``~/.fastai/data``, or the folder set by ``FASTAI_HOME`` and its ``config.ini``); a download, which is kept in this
    cache. An interrupted download is continued; see `nbdist.recsys.datasets.download`.

    The folder of `path` or ``NBDIST_DATA`` may contain a part of the set, such as the ratings of some users; a warning
    and `source` give the number. Titles may be in UTF-8, or in Latin-1, as in GroupLens' own 100k and 1m.

    Args:
        name: "100k", "1m", "10m", "20m", "25m", "32m" or "latest-small".
        path: The unpacked folder, or a folder that contains it.
        download: False never uses the network.
        synthetic: Whether to return `synthetic_ratings` of the same size, with a warning, if the server cannot be
            reached.
        url: The address of the download. None: from GroupLens. It must have GroupLens's checksum.

    Raises:
        FileNotFoundError: `path` or ``NBDIST_DATA`` lacks a file; or there is no source and `download` is False.
        ConnectionError: The server cannot be reached, or the download broke off several times.
        urllib.error.URLError: The server answered with an error or a bad certificate.
        ValueError: A file has a different format, or another number of ratings than the set (for a folder of `path`:
            more ratings). The message names the file.

    Examples:
        >>> from nbdist.recsys.datasets import movielens
        >>> ratings, movies, source = movielens("100k", synthetic=True)  # invented ones where there is no network
        >>> ratings.height
        100000
        >>> movies.columns
        ['movie', 'title', 'genres']
    """
    if name not in EDITIONS:
        raise ValueError(f"{name!r} is not a MovieLens set that nbdist knows; choose one of {', '.join(EDITIONS)}")
    edition = EDITIONS[name]
    files = " and ".join(edition.files)
    for given, what in ((path, ""), (os.environ.get("NBDIST_DATA") or None, "NBDIST_DATA: ")):
        if given is None:
            continue
        for folder in (Path(given).expanduser(), Path(given).expanduser() / edition.folder):
            if holds(folder, edition.files):
                frame, movies = _read(name, folder, part=True)
                source = f"MovieLens {name} from the folder {folder}"
                if frame.height == edition.ratings or edition.md5 is None:
                    return Ratings(frame, movies, f"{source}.")
                source = f"A part of {source}: {frame.height:,} of {edition.ratings:,} ratings."
                warnings.warn(f"{source} If you have not made these files yourself, they are incomplete.", stacklevel=2)
                return Ratings(frame, movies, source)
        raise FileNotFoundError(f"{what}neither {given} nor its folder {edition.folder} holds {files}")

    folder = _fastai_data() / edition.folder
    if holds(folder, edition.files):
        return Ratings(*_read(name, folder), f"MovieLens {name} from fastai's cache, {folder}.")
    if not download:
        raise FileNotFoundError(f"no {files} in {folder}, and download=False")
    url = url or _URL.format(edition.archive or edition.folder)
    try:
        fetch_folder(url, edition.md5, folder, edition.files)
    except Unreachable as error:
        where = f"set NBDIST_DATA to a folder that holds {files}"
        if not synthetic:
            raise ConnectionError(
                f"{error}. Without a network: {where}, or take invented ratings of the same size with synthetic=True"
            ) from error
        source = (
            f"Synthetic ratings, NOT MovieLens: {error}. There are as many as in MovieLens {name}, with invented "
            f"users, titles and tastes. To use the real data, {where}."
        )
        warnings.warn(source, stacklevel=2)
        return synthetic_ratings(edition.users, edition.movies, edition.ratings)._replace(source=source)
    return Ratings(*_read(name, folder), f"MovieLens {name}, downloaded from {url} and kept in {folder}.")


def _fastai_data() -> Path:
    """Return the folder of fastai's data sets, from its settings; importing fastai would take seconds."""
    home = Path(os.environ.get("FASTAI_HOME", "~/.fastai")).expanduser().absolute()
    config = configparser.ConfigParser()
    config.read(home / "config.ini", encoding="utf8")
    return home / config["DEFAULT"].get("data", "data")


def _read(name: str, folder: Path, part: bool = False) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Read ratings and movies, and check that they are complete. With `part`, check only that there are not too
    many."""
    edition = EDITIONS[name]
    data, item = (folder / file for file in edition.files)
    frame, movies = edition.read(data, item)
    if frame.null_count().sum_horizontal().item():
        raise ValueError(f"{data}: some lines have fewer than 4 numbers")
    if not frame["rating"].is_between(0.5, 5).all():
        raise ValueError(f"{data}: ratings outside 0.5..5")
    may_differ = edition.md5 is None or (part and 0 < frame.height < edition.ratings)
    if frame.height != edition.ratings and not may_differ:
        raise ValueError(
            f"{data} has {frame.height:,} ratings, MovieLens {name} has {edition.ratings:,}: not all of it was "
            f"downloaded or unpacked. Remove {folder} and get it again"
        )
    if movies.null_count().sum_horizontal().item() or movies["movie"].is_duplicated().any():
        raise ValueError(f"{item}: some lines have no number, no title, or the number of another movie")
    unknown = frame.select(pl.col("movie").unique().sort()).join(movies, on="movie", how="anti", maintain_order="left")
    if unknown.height:
        raise ValueError(f"{item}: no title for {unknown.height} rated movies, the first of them {unknown.item(0, 0)}")
    return frame, movies


def _csv(path: Path, separator: str, schema: dict[str, Any], **options: Any) -> pl.DataFrame:
    """Read a file of columns; text is UTF-8, or else Latin-1."""
    source: Any = path
    if len(separator) > 1:  # polars takes one byte
        source, separator = path.read_bytes().replace(separator.encode(), b"\t"), "\t"
    if pl.String in schema.values():
        source = _utf8(path.read_bytes() if source is path else source)
    settings = {"has_header": False, "quote_char": None} | options
    try:
        return pl.read_csv(source, separator=separator, schema=schema, **settings)
    except pl.exceptions.PolarsError as error:
        expected = (
            f"{len(schema)} columns ({', '.join(list(schema)[:4])}, ...)" if len(schema) > 4 else ", ".join(schema)
        )
        raise ValueError(f"{path}: not lines of {expected}: {str(error).splitlines()[0]}") from error


def _utf8(text: bytes) -> bytes:
    """Convert text to UTF-8, without a byte order mark. Latin-1 text with letters beyond ASCII is almost never valid
    UTF-8."""
    for encoding in ("utf-8-sig", "cp1252"):  # the latter is Latin-1 with quotation marks and dashes
        with contextlib.suppress(UnicodeDecodeError):
            return text.decode(encoding).encode()
    return text.decode("latin-1").encode()


def _genres(text: pl.Expr) -> pl.Expr:
    """Return the lists of genres between bars; empty for "(no genres listed)" and for an empty text."""
    listed = text.fill_null("").str.replace("(no genres listed)", "", literal=True)
    return listed.str.extract_all(r"[^|]+").alias("genres")


def _read_100k(data: Path, item: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    # A flag for each genre comes last, that for none known first.
    schema = {"movie": pl.Int32, "title": pl.String, "release": pl.String, "video": pl.String, "page": pl.String}
    flags = {genre: pl.Int8 for genre in ("unknown", *GENRES)}
    movies = _csv(item, "|", {**schema, **flags})
    named = [pl.when(pl.col(genre) == 1).then(pl.lit(genre)) for genre in GENRES]
    genres = pl.concat_list(named).list.drop_nulls().alias("genres")
    return _csv(data, "\t", SCHEMA), movies.select("movie", "title", genres)


def _read_dat(data: Path, item: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    movies = _csv(item, "::", {"movie": pl.Int32, "title": pl.String, "genres": pl.String})
    return _csv(data, "::", SCHEMA), movies.select("movie", "title", _genres(pl.col("genres")))


def _read_csv(data: Path, item: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
    movies = _named(item, {"movieId": pl.Int32, "title": pl.String, "genres": pl.String}).rename({"movieId": "movie"})
    ratings = _named(data, {_CSV_NAMES.get(name, name): dtype for name, dtype in SCHEMA.items()})
    return ratings.rename({there: name for name, there in _CSV_NAMES.items()}), movies.select(
        "movie", "title", _genres(pl.col("genres"))
    )


def _named(path: Path, schema: dict[str, Any]) -> pl.DataFrame:
    """Read columns of a file by the names in its first line, in any order."""
    source = _utf8(path.read_bytes()) if pl.String in schema.values() else path
    try:
        names = pl.read_csv(source, n_rows=0, infer_schema=False).columns
        if missing := [name for name in schema if name not in names]:
            raise ValueError(f"{path}: the first line must name {', '.join(schema)}, but it lacks {', '.join(missing)}")
        return pl.read_csv(source, columns=list(schema), schema_overrides=schema).select(list(schema))
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"{path}: not lines of {', '.join(schema)}: {str(error).splitlines()[0]}") from error


_CSV = "ratings.csv", "movies.csv"
_CSV_NAMES = {"user": "userId", "movie": "movieId"}
# Sums: https://files.grouplens.org/datasets/movielens/, the .md5 files. Counts: the README of each set.
EDITIONS = {
    "100k": Edition(
        "ml-100k", "0e33842e24a9c977be4e0107933c0723", 943, 1682, 100_000, ("u.data", "u.item"), _read_100k
    ),
    "1m": Edition(
        "ml-1m", "c4d9eecfca2ab87c1945afe126590906", 6040, 3706, 1_000_209, ("ratings.dat", "movies.dat"), _read_dat
    ),
    "10m": Edition(
        "ml-10M100K",
        "ce571fd55effeba0271552578f2648bd",
        69_878,
        10_677,
        10_000_054,
        ("ratings.dat", "movies.dat"),
        _read_dat,
        "ml-10m",
    ),
    "20m": Edition("ml-20m", "cd245b17a1ae2cc31bb14903e1204af3", 138_493, 26_744, 20_000_263, _CSV, _read_csv),
    "25m": Edition(
        "ml-25m",
        "6b51fb2759a8657d3bfcbfc42b592ada",
        162_541,
        59_047,
        25_000_095,
        _CSV,
        _read_csv,
    ),
    "32m": Edition("ml-32m", "d472be332d4daa821edc399621853b57", 200_948, 84_432, 32_000_204, _CSV, _read_csv),
    "latest-small": Edition("ml-latest-small", None, 610, 9724, 100_836, _CSV, _read_csv),
}
