"""A folder from the web: resumed, checked, whole or not at all; against a real server on this machine."""

from __future__ import annotations

import hashlib
import http.server
import io
import re
import socket
import threading
import urllib.error
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import poll
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbdist.recsys.datasets import download
from nbdist.recsys.datasets.download import Unreachable, fetch_folder

FILES = ("a.txt", "b.txt")


def archive(**extra: str) -> bytes:
    """A zip file with a folder `set`, and `extra` members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        opened.writestr("set/a.txt", "first")
        opened.writestr("set/b.txt", "second" * 1000)
        for name, text in extra.items():
            opened.writestr(name, text)
    return buffer.getvalue()


def md5(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Answers with `body`, or with 404 when there is none. Each of `cuts` ends one answer after this number of
    bytes."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body: bytes | None = archive()
        self.cuts: list[int] = []
        self.ranges = True
        self.asked: list[str | None] = []
        self.gate = threading.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/set.zip"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body, wanted = self.server.body, self.headers["Range"]
        self.server.asked.append(wanted)
        self.server.gate.wait()
        if body is None:
            return self.send_error(404)
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and self.server.ranges else 0  # type: ignore[index]
        if start and start >= len(body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        stop = start + self.server.cuts.pop(0) if self.server.cuts else len(body)
        self.wfile.write(body[start:stop])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE", 0.0)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nothing listens at: bound, so that no other process can take it meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def fetch(server: Server, target: Path, body: bytes | None = None) -> None:
    fetch_folder(server.url, md5(server.body or b"" if body is None else body), target, FILES)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_download_is_unpacked_with_all_that_it_has(server: Server, tmp_path: Path) -> None:
    server.body = archive(**{"set/README": "hello", "other/x": "not asked for"})
    fetch(server, tmp_path / "new" / "set")
    assert names(tmp_path / "new") == ["set"], "nothing is left beside it"
    assert names(tmp_path / "new" / "set") == ["README", "a.txt", "b.txt"]
    assert (tmp_path / "new" / "set" / "b.txt").read_text() == "second" * 1000
    assert server.asked == [None]


@given(
    cuts=st.lists(st.integers(1, 3000), max_size=4),
    ranges=st.booleans(),
)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_an_interrupted_download_is_continued(
    server: Server, tmp_path_factory: pytest.TempPathFactory, cuts: list[int], ranges: bool
) -> None:
    """A download goes on, also if the server does not know about ranges."""
    folder = tmp_path_factory.mktemp("data")
    server.cuts, server.ranges, server.asked = list(cuts), ranges, []
    fetch(server, folder / "set")
    assert names(folder) == ["set"] and names(folder / "set") == list(FILES)
    assert server.asked[0] is None and len(server.asked) <= len(cuts) + 1
    if ranges:
        sums = [sum(cuts[: i + 1]) for i in range(len(server.asked) - 1)]
        assert server.asked[1:] == [f"bytes={have}-" for have in sums], "only what is missing is asked for"


def test_an_incomplete_download_is_kept_for_the_next_call(server: Server, tmp_path: Path) -> None:
    server.cuts = [1000] * download.ATTEMPTS
    with pytest.raises(ConnectionError, match=r"failed 5 times.*closed after.*5,000 bytes.*set\.zip\.part") as caught:
        fetch(server, tmp_path / "set")
    assert not isinstance(caught.value, Unreachable)
    assert names(tmp_path) == ["set.zip.part"]
    fetch(server, tmp_path / "set")
    assert server.asked[-1] == "bytes=5000-" and names(tmp_path) == ["set"]


def test_an_interrupt_keeps_what_has_come(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    server.cuts = [2000]
    with monkeypatch.context() as patch:
        patch.setattr(download.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch(server, tmp_path / "set")
    assert (tmp_path / "set.zip.part").stat().st_size == 2000 and not (tmp_path / "set").exists()
    fetch(server, tmp_path / "set")
    assert server.asked[-1] == "bytes=2000-"


def test_a_complete_download_is_not_requested_again(server: Server, tmp_path: Path) -> None:
    """Killed between download and unpacking: the server has nothing after the last byte."""
    assert server.body is not None
    (tmp_path / "set.zip.part").write_bytes(server.body)
    fetch(server, tmp_path / "set")
    assert server.asked == [f"bytes={len(server.body)}-"] and names(tmp_path) == ["set"]


def test_a_wrong_checksum_is_refused_and_the_file_removed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set.zip.part").write_bytes(b"of another file")
    with pytest.raises(ValueError, match=r"MD5 sum \w{32} instead of \w{32}.*call again"):
        fetch(server, tmp_path / "set")
    assert names(tmp_path) == []
    fetch(server, tmp_path / "set")
    assert names(tmp_path) == ["set"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>Please log in</html>", "not a usable zip"),
        (archive()[:-30], "not a usable zip"),
        (archive(**{"../../escaped": "x"}), "leads outside"),
        (archive(**{"set/../../../escaped": "x"}), "leads outside"),
        (archive(**{"/tmp/escaped": "x"}), "leads outside"),
        (archive(**{"set\\..\\escaped": "x"}), "leads outside"),
        (archive().replace(b"b.txt", b"c.txt"), "has no set/a.txt and set/b.txt"),
    ],
)
def test_a_bad_archive_is_refused(server: Server, tmp_path: Path, body: bytes, message: str) -> None:
    server.body = body
    with pytest.raises(ValueError, match=message):
        fetch(server, tmp_path / "one" / "two" / "set")
    assert names(tmp_path / "one" / "two") == [] and not list(tmp_path.rglob("escaped"))
    assert not Path("/tmp/escaped").exists()


def test_an_unfinished_folder_is_completed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").write_text("fi")
    fetch(server, tmp_path / "set")
    assert (tmp_path / "set" / "a.txt").read_text() == "first" and names(tmp_path) == ["set"]


def test_killed_while_unpacking(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder does not appear before it is whole."""
    seen = []
    move = zipfile.ZipFile.extractall

    def extractall(self: zipfile.ZipFile, path: Path) -> None:
        move(self, path)
        seen.append((tmp_path / "set").exists())
        raise SystemExit

    monkeypatch.setattr(zipfile.ZipFile, "extractall", extractall)
    with pytest.raises(SystemExit):
        fetch(server, tmp_path / "set")
    assert seen == [False] and names(tmp_path) == ["set.zip.part"], "what was downloaded is still there"


def test_only_one_of_several_callers_downloads(server: Server, tmp_path: Path) -> None:
    """Ranks do that. The lock is one between open files, so threads stand in for processes."""
    server.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        try:
            calls = [pool.submit(fetch, server, tmp_path / "set") for _ in range(3)]
            assert poll(lambda: server.asked)
        finally:
            server.gate.set()
        for call in calls:
            call.result()
    assert len(server.asked) == 1 and names(tmp_path) == ["set"]


def test_an_answer_with_an_error_is_raised(server: Server, tmp_path: Path) -> None:
    server.body = None
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(server, tmp_path / "set")
    assert names(tmp_path) == []


def test_offline(closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(Unreachable, match=r"http://127.*/set\.zip could not be reached: .*refused"):
        fetch_folder(f"http://127.0.0.1:{closed_port}/set.zip", md5(b""), tmp_path / "set", FILES)
    assert names(tmp_path) == []


def test_only_http_addresses_are_accepted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http"):
        fetch_folder((tmp_path / "x.zip").as_uri(), md5(b""), tmp_path / "set", FILES)


def test_progress_is_shown(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch(server, tmp_path / "set")
    assert re.search(r"set\.zip: 100%.*k/", capsys.readouterr().err)
