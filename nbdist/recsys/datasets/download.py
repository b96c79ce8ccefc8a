"""Download of a zip file into a folder: continued after an interruption, checked, unpacked safely, complete or
absent."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import shutil
import ssl
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

TIMEOUT = 20.0
"""Seconds that one network operation may take."""
ATTEMPTS = 5
"""The number of times that a call continues a download that broke off, and the seconds between:"""
PAUSE = 2.0


class Unreachable(ConnectionError):
    """No server answered at the address."""


class _BrokenOff(Exception):
    """The connection ended before the file did."""


def holds(folder: Path, files: Sequence[str]) -> bool:
    """Return whether a folder has all these files."""
    return all((folder / name).is_file() for name in files)


def fetch_folder(url: str, md5: str | None, target: Path, files: Sequence[str]) -> None:
    """Download the zip file at `url`, and unpack from it the folder with the name of `target` to `target`.

    The part of an interrupted download is kept next to `target`, as ``<name>.zip.part``. This call continues it several
    times, and a later call continues it, too. If several processes want the same file, one downloads it and the others
    wait. `target` appears only with all files of the archive.

    Args:
        url: http(s) address of the zip file.
        md5: The MD5 sum of the file, as hexadecimal digits. None: the file is replaced at times, so only the checksums
            in the archive are checked.
        target: The folder to make.
        files: The files that it must contain.

    Raises:
        Unreachable: No server answered.
        ConnectionError: The download started, but the connection was lost several times.
        urllib.error.URLError: The server answered with an error or a bad certificate.
        ValueError: `url` is no web address; the file has another checksum, is no zip file, has a path that leads
            outside it, or lacks `files`. What was downloaded is removed.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"not an http(s) address: {url!r}")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f"{target.name}.zip.part"
    with open(part, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove = True
        try:
            if not holds(target, files):  # else another process was first
                _download(url, file)
                if md5 is not None:
                    _verify(file, md5, url)
                _unpack(file, target, files, url)
        except ValueError:
            raise
        except BaseException:  # an interrupt, too
            remove = file.seek(0, os.SEEK_END) == 0
            raise
        finally:
            if remove:
                part.unlink(missing_ok=True)


def _download(url: str, file: BinaryIO) -> None:
    """Append the missing bytes to `file`."""
    reason: Exception | None = None
    for attempt in range(ATTEMPTS):
        try:
            if attempt:
                time.sleep(PAUSE)
            return _receive(url, file)
        except (_BrokenOff, Unreachable) as error:
            if not attempt and isinstance(error, Unreachable):
                raise
            reason = error
    raise ConnectionError(
        f"the download of {url} failed {ATTEMPTS} times, the last time with: {reason}. The {file.tell():,} bytes "
        f"received so far are in {file.name}: call again to continue from there"
    )


def _receive(url: str, file: BinaryIO) -> None:
    from tqdm.auto import tqdm

    have = file.seek(0, os.SEEK_END)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if have and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # there is no more of it; the checksum shows whether it is the file
        raise
    except (OSError, http.client.HTTPException) as error:  # no name server, no route, refused, timed out, no answer
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise
        raise Unreachable(f"{url} could not be reached: {reason}") from error
    with response:
        if have and response.status != http.HTTPStatus.PARTIAL_CONTENT:  # this server sends the whole
            have = file.truncate(0)
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        name = url.rpartition("/")[2]
        with tqdm(desc=name, initial=have, total=total, unit="B", unit_scale=True, unit_divisor=1024) as bar:
            while True:
                try:
                    chunk = response.read1(1 << 18)
                except (OSError, http.client.HTTPException) as error:
                    raise _BrokenOff(repr(error)) from error
                if not chunk:
                    break
                file.write(chunk)
                bar.update(len(chunk))
    if total is not None and file.tell() != total:
        raise _BrokenOff(f"the connection was closed after {file.tell():,} of {total:,} bytes")


def _verify(file: BinaryIO, md5: str, url: str) -> None:
    file.seek(0)
    digest = hashlib.md5(usedforsecurity=False)
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    if digest.hexdigest() != md5:
        raise ValueError(
            f"the file from {url} has the MD5 sum {digest.hexdigest()} instead of {md5}: it is damaged, or another "
            "file. It was removed; call again to download it"
        )


def _unpack(archive: BinaryIO, target: Path, files: Sequence[str], url: str) -> None:
    # In the target's parent folder, so that the move is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        root = Path(scratch).resolve()
        try:
            with zipfile.ZipFile(archive) as opened:
                for name in opened.namelist():
                    # ZipFile would quietly rename such members; an archive that has one is not to be trusted.
                    if "\\" in name or not (root / name).resolve().is_relative_to(root):
                        raise ValueError(f"{url}: refusing an archive with a path that leads outside it: {name!r}")
                opened.extractall(root)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{url}: not a usable zip file: {error}") from error
        if not holds(root / target.name, files):
            raise ValueError(f"{url}: the archive has no {' and '.join(f'{target.name}/{name}' for name in files)}")
        try:
            (root / target.name).rename(target)
        except OSError:
            # There already, with some files missing: what an attempt by other means has left.
            shutil.copytree(root / target.name, target, dirs_exist_ok=True, copy_function=os.replace)
