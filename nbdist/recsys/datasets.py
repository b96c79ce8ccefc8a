"""Ratings to train recommenders on: MovieLens 100k from disk or the network, and a synthetic stand-in.

Both have one row per rating and the same columns and dtypes::

    user       int64   1 .. n_users
    movie      int64   1 .. n_items
    rating     int64   1 .. 5
    timestamp  int64   seconds since 1970-01-01 UTC
    title      string  "Name (year)"
"""

from __future__ import annotations

import configparser
import http.client
import io
import os
import shutil
import ssl
import tempfile
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

ML_100K_URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
FOLDER, FILES = "ml-100k", ("u.data", "u.item")
TIMEOUT = 20.0  # seconds that one network operation may take


class Ratings(NamedTuple):
    """Ratings and where they came from; unpacks as ``frame, source = movielens_100k()``."""

    frame: pd.DataFrame
    """One row per rating, with the columns that the module's docstring lists."""
    source: str
    """What was used, in a sentence to print beside the results."""


class _NoNetwork(Exception):
    """The server could not be reached at all."""


def movielens_100k(
    path: str | os.PathLike[str] | None = None, *, download: bool = True, url: str = ML_100K_URL
) -> Ratings:
    """MovieLens 100k, every rating with its movie's title, in the order of ``u.data``.

    The first of these that is there is used: `path`; the folder that the environment variable
    ``NBDIST_DATA`` names; fastai's cache (``~/.fastai/data``, or where ``FASTAI_HOME`` and its ``config.ini``
    put it); a download from `url`, which is kept in that cache; and, only when the server cannot be reached,
    `synthetic_ratings()`, with a warning.

    Args:
        path: a folder with ``u.data`` and ``u.item``, or with a folder ``ml-100k`` that has them.
        download: False never uses the network.
        url: http(s) address of a zip file that holds ``u.data`` and ``u.item`` in ``ml-100k/``.

    Raises:
        FileNotFoundError: `path` or ``NBDIST_DATA`` lacks a file; or none is there and `download` is False.
        ValueError: a file, or the archive, is not what it should be; the message names it.
        urllib.error.URLError: the server was reached but answered with an error or a bad certificate.
        ConnectionError: the download began and then broke off.
    """
    for given, name in ((path, ""), (os.environ.get("NBDIST_DATA") or None, "NBDIST_DATA: ")):
        if given is not None:
            folder = _find(Path(given).expanduser())
            if folder is None:
                raise FileNotFoundError(
                    f"{name}neither {given} nor its folder {FOLDER} holds both {' and '.join(FILES)}"
                )
            return Ratings(_read(folder), f"MovieLens 100k from the folder {folder}.")

    cache = _fastai_data()
    folder = _find(cache / FOLDER)
    if folder is not None:
        return Ratings(_read(folder), f"MovieLens 100k from fastai's cache, {folder}.")
    if not download:
        raise FileNotFoundError(f"no {' and '.join(FILES)} in {cache / FOLDER}, and download=False")

    try:
        archive = _fetch(url)
    except _NoNetwork as error:
        source = (
            f"Synthetic ratings, NOT MovieLens: {url} could not be reached ({error}). They have the same "
            "columns and size as MovieLens 100k, with invented users, titles and tastes. To use the real "
            f"data, set NBDIST_DATA to a folder that holds {' and '.join(FILES)}."
        )
        warnings.warn(source, stacklevel=2)
        return Ratings(synthetic_ratings(), source)
    folder = _unpack(archive, cache / FOLDER, url)
    return Ratings(_read(folder), f"MovieLens 100k, downloaded from {url} and kept in {folder}.")


def _find(folder: Path) -> Path | None:
    """`folder` or its ``ml-100k``, whichever holds the files; None if neither does."""
    for candidate in (folder, folder / FOLDER):
        if all((candidate / name).is_file() for name in FILES):
            return candidate
    return None


def _fastai_data() -> Path:
    """Where fastai keeps data sets. Reads its settings as fastai does; importing it would take seconds."""
    home = Path(os.environ.get("FASTAI_HOME", "~/.fastai")).expanduser().absolute()
    config = configparser.ConfigParser()
    config.read(home / "config.ini", encoding="utf8")
    return home / config["DEFAULT"].get("data", "data")


def _read(folder: Path) -> pd.DataFrame:
    """The ratings in `folder`, merged with the titles."""
    data, item = (folder / name for name in FILES)
    if data.stat().st_size == 0:
        raise ValueError(f"{data} is empty")
    try:
        table = np.loadtxt(data, dtype=np.int64, delimiter="\t", comments=None, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{data}: not four integers separated by tabs on each line: {error}") from error
    if table.shape[0] == 0 or table.shape[1] != 4:
        raise ValueError(f"{data}: expected lines of 4 integers, found an array of shape {table.shape}")
    if not np.isin(table[:, 2], np.arange(1, 6)).all():
        raise ValueError(f"{data}: ratings outside 1..5")

    titles: dict[int, str] = {}
    for number, line in enumerate(item.read_text(encoding="latin-1").split("\n"), 1):
        if line.strip():
            fields = line.split("|")
            if len(fields) < 2 or not fields[0].isdecimal():
                raise ValueError(f"{item}, line {number}: expected 'number|title|...', found {line[:60]!r}")
            titles[int(fields[0])] = fields[1]

    frame = pd.DataFrame(table, columns=["user", "movie", "rating", "timestamp"])
    unknown = sorted(set(frame["movie"]) - titles.keys())
    if unknown:
        raise ValueError(f"{item}: no title for {len(unknown)} rated movies, the first of them {unknown[0]}")
    return frame.assign(title=[titles[movie] for movie in table[:, 1].tolist()])


def _fetch(url: str) -> bytes:
    """The body at `url` (ML-100k: 5 MB), or _NoNetwork."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"not an http(s) address: {url!r}")
    try:
        response = urllib.request.urlopen(url, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    except OSError as error:  # URLError included: no name server, no route, refused, timed out, blocked by a proxy
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise
        raise _NoNetwork(str(reason)) from error
    with response:
        try:
            body: bytes = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"the download of {url} broke off: {error!r}") from error
    return body


def _unpack(archive: bytes, target: Path, url: str) -> Path:
    """Unpack the ``ml-100k`` folder of `archive` so that `target` only ever appears complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the move is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=".ml-100k-", dir=target.parent) as scratch:
        root = Path(scratch).resolve()
        try:
            with zipfile.ZipFile(io.BytesIO(archive)) as opened:
                for name in opened.namelist():
                    # ZipFile would quietly rename such members; an archive that has one is not to be trusted.
                    if "\\" in name or not (root / name).resolve().is_relative_to(root):
                        raise ValueError(f"{url}: refusing an archive with a path that leads outside it: {name!r}")
                opened.extractall(root)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{url}: not a usable zip file: {error}") from error
        if not all((root / FOLDER / name).is_file() for name in FILES):
            raise ValueError(f"{url}: the archive has no {' and '.join(f'{FOLDER}/{name}' for name in FILES)}")
        try:
            (root / FOLDER).rename(target)
        except OSError:
            # There already: another process was faster (same files), or an earlier attempt left some out.
            shutil.copytree(root / FOLDER, target, dirs_exist_ok=True, copy_function=os.replace)
    return target


def synthetic_ratings(
    n_users: int = 943, n_items: int = 1682, n_ratings: int = 100_000, *, seed: int = 42
) -> pd.DataFrame:
    """Ratings with MovieLens-like popularity and a planted structure that a model can learn.

    A rating is ``3.5 + user bias + movie bias + <user taste, movie character> + noise``, rounded and clipped
    to 1..5; tastes and characters have 4 dimensions. About half of the variance is structure. A pair of user
    and movie occurs once at most, every user and every movie at least once, and the rows are in random order.
    Who rates what has a long tail: few busy users, few popular movies; popular movies are liked more.

    Takes memory and time in proportion to ``n_users * n_items`` (about 0.2 s at the default size).

    Args:
        n_users: users, numbered from 1.
        n_items: movies, numbered from 1, each with an invented title of its own.
        n_ratings: rows to return.
        seed: equal seeds give equal ratings, whatever state the global generators are in.

    Returns:
        A frame of shape (n_ratings, 5): user, movie, rating, timestamp (seconds), title.

    Raises:
        ValueError: a size is not positive, or `n_ratings` is too few to cover all or more than all pairs.
    """
    if min(n_users, n_items) < 1:
        raise ValueError(f"n_users and n_items must be positive, got {n_users} and {n_items}")
    most = max(n_users, n_items)
    if not most <= n_ratings <= n_users * n_items:
        raise ValueError(f"n_ratings must be in {most}..{n_users * n_items} to cover all, got {n_ratings}")
    rng = np.random.default_rng(seed)

    activity, popularity = rng.normal(0.0, 0.9, n_users), rng.normal(0.0, 1.4, n_items)
    # Log weights plus Gumbel noise: the n_ratings largest are a weighted sample without replacement.
    score = activity[:, None] + popularity + rng.gumbel(size=(n_users, n_items))  # (n_users, n_items)
    # A diagonal that wraps round meets every row and every column; its cells are taken first.
    step = np.arange(most)
    score[rng.permutation(n_users)[step % n_users], rng.permutation(n_items)[step % n_items]] = np.inf
    pairs = rng.permutation(np.argpartition(score.ravel(), -n_ratings)[-n_ratings:])
    user, item = np.divmod(pairs, n_items)  # each (n_ratings,)

    user_bias = rng.normal(0.0, 0.40, n_users)
    item_bias = rng.normal(-0.35, 0.40, n_items) + 0.18 * popularity
    taste, character = rng.normal(size=(n_users, 4)), rng.normal(size=(n_items, 4))
    match = 0.28 * np.einsum("nk,nk->n", taste[user], character[item])
    wish = 3.5 + user_bias[user] + item_bias[item] + match + rng.normal(0.0, 0.72, n_ratings)
    return pd.DataFrame(
        {
            "user": user + 1,
            "movie": item + 1,
            "rating": np.clip(np.rint(wish), 1, 5).astype(np.int64),
            "timestamp": rng.integers(874_724_710, 893_286_639, n_ratings),  # MovieLens' seven months, 1997-98
            "title": np.array(_titles(n_items, rng), dtype=object)[item],
        }
    ).astype({"title": "str"})


def _titles(n: int, rng: np.random.Generator) -> list[str]:
    """`n` different invented titles."""
    adjectives = (
        "Amber Borrowed Brittle Careful Copper Crooked Distant Drowsy Empty Faded Folded Gentle Hollow "
        "Honest Idle Ivory Jagged Late Lopsided Mild Narrow Northern Painted Patient Quiet Restless "
        "Rusted Salted Scarlet Second Silent Slanted Sleepless Slow Sudden Tangled Thirteenth Unlit "
        "Velvet Wandering Whispering Winter"
    ).split()
    nouns = (
        "Almanac Anchor Attic Barometer Beekeeper Bicycle Bridge Cartographer Chimney Clockmaker "
        "Corridor Ferry Footpath Glacier Greenhouse Harbor Hinge Jetty Kettle Lantern Ledger Lighthouse "
        "Locksmith Meadow Mill Orchard Parlor Pier Postcard Quarry Raincoat Reservoir Sawmill Scarecrow "
        "Signal Staircase Suitcase Teapot Tide Umbrella Viaduct Weathervane"
    ).split()
    names = [f"The {adjective} {noun}" for adjective in adjectives for noun in nouns]
    order, years = rng.permutation(len(names)), rng.integers(1930, 1999, n)
    sequels = ["", *(f" {part}" for part in range(2, n // len(names) + 2))]
    return [f"{names[order[i % len(names)]]}{sequels[i // len(names)]} ({years[i]})" for i in range(n)]
