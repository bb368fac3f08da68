"""Data files: found, unpacked, downloaded and checked, or an error that says what to do."""

import gzip
import hashlib
import http.server
import io
import lzma
import os
import threading
import zipfile

import pytest

from experiments.folder import Folder, MissingData, Source
from experiments.tasks import cifar


def test_plain_xz_and_gz_are_read_alike(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"two"))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"three"))
    folder = Folder(tmp_path)
    assert [folder.read(f"{name}.txt") for name in "abc"] == [b"one", b"two", b"three"]


def test_environment_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HEELER_DATA", str(tmp_path))
    assert Folder().path == tmp_path
    with pytest.raises(MissingData, match="there is no data folder"):
        Folder(tmp_path / "nowhere")


def test_missing_files_are_fetched_checked_and_kept(tmp_path):
    original = tmp_path / "original"
    original.write_bytes(b"public data")
    told = []
    folder = Folder(tmp_path, progress=lambda name, done, size: told.append((name, done)))
    digest = hashlib.sha256(b"public data").hexdigest()
    assert folder.read("sub/copy", Source(original.as_uri(), digest)) == b"public data"
    assert told == [("sub/copy", 11)]
    original.unlink()
    assert folder.read("sub/copy", Source(original.as_uri(), digest)) == b"public data"


def test_a_damaged_download_is_not_kept(tmp_path):
    (tmp_path / "original").write_bytes(b"damaged")
    folder = Folder(tmp_path)
    with pytest.raises(MissingData, match="has sha256"):
        folder.read("copy", Source((tmp_path / "original").as_uri(), "0" * 64))
    assert folder.find("copy") is None


def test_members_of_archives(tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as files:
        files.writestr("SST-2/train.tsv", "text")
    (tmp_path / "archive.zip").write_bytes(packed.getvalue())
    source = Source((tmp_path / "archive.zip").as_uri(), member="SST-2/train.tsv")
    assert Folder(tmp_path).read("train.tsv", source) == b"text"


def test_without_a_network_the_error_says_what_to_put_where(tmp_path):
    source = Source((tmp_path / "unreachable").as_uri())
    with pytest.raises(MissingData, match=r"cannot be reached.*put it at .*wikitext-2/train.txt"):
        Folder(tmp_path).read("wikitext-2/train.txt", source)


class _BreaksOff(http.server.BaseHTTPRequestHandler):
    """Announces more than it sends."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x" * 400)

    def log_message(self, *args):
        pass


def test_a_download_that_breaks_off_is_not_kept(tmp_path):
    server = http.server.HTTPServer(("127.0.0.1", 0), _BreaksOff)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(MissingData, match="400 of 1000 bytes"):
            Folder(tmp_path).read("file.bin", Source(f"http://127.0.0.1:{server.server_port}/file.bin"))
    finally:
        server.shutdown()
        server.server_close()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_archive_is_not_kept(tmp_path, monkeypatch):
    (tmp_path / "source.tar").write_bytes(b"no archive")
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setattr(cifar, "ORIGINAL", (tmp_path / "source.tar").as_uri())
    with pytest.raises(MissingData, match="not kept"):
        cifar.read_images(Folder(data))
    assert list(data.iterdir()) == []


def test_scratch_names_cannot_be_foreseen(tmp_path, monkeypatch):
    seen = []
    true = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: seen.append(str(a)) or true(a, b))
    for _ in range(2):
        Folder(tmp_path).keep("file.bin", b"x")
    assert seen[0] != seen[1]
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]
