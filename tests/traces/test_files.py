"""Opening, limits and atomic writing: what every reader and writer of the project stands on."""

from __future__ import annotations

import gzip
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import traces
from tests.traces.forms.test_native import BASE, message, read
from traces import files
from traces.errors import OutputError, TraceError
from traces.files import open_maybe_gzip, read_bytes, sniff, write_atomically
from traces.text import one_line, path_text, quoted

as_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may read and write everything")


# Reading


@pytest.mark.parametrize("data", [b"", b"x", b"abc" * 100_000, b"\x1f", b"\x1f\x8b"[:1]])
def test_bytes_come_back_zipped_or_not(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "plain").write_bytes(data)
    (tmp_path / "zipped").write_bytes(gzip.compress(data))
    (tmp_path / "two members").write_bytes(gzip.compress(data[:10]) + gzip.compress(data[10:]))
    assert {read_bytes(path) for path in tmp_path.iterdir()} == {data}


def test_a_stream_can_be_read_in_pieces(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(gzip.compress(data))
    with open_maybe_gzip(tmp_path / "a") as stream:
        assert stream.peek(4)[:4] == data[:4]
        assert stream.read(1000) == data[:1000]
        assert stream.readline() == data[1000:1035]
        assert stream.read() == data[1035:]


def test_a_truncated_gzip_file(tmp_path: Path) -> None:
    whole = gzip.compress(os.urandom(5000))
    for length in (3, 10, 100, len(whole) - 1):
        (tmp_path / "a").write_bytes(whole[:length])
        assert "truncated" in message(lambda: read_bytes(tmp_path / "a"))


@pytest.mark.parametrize("at", [3, 12, 500, -6, -2])
def test_a_damaged_gzip_file(tmp_path: Path, at: int) -> None:
    whole = bytearray(gzip.compress(bytes(range(256)) * 20, mtime=0))
    whole[at if at < 0 else at % len(whole)] ^= 0xFF
    (tmp_path / "a").write_bytes(whole)
    text = message(lambda: read_bytes(tmp_path / "a"))
    assert "gzip data" in text


def test_rubbish_after_gzip_data(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(b"data") + b"rubbish")
    assert "damaged gzip data" in message(lambda: read_bytes(tmp_path / "a"))


def test_a_decompression_bomb_stops_at_the_limit(tmp_path: Path) -> None:
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(50 << 20)))
    assert (tmp_path / "bomb").stat().st_size < 1 << 17
    assert "more than 1048576 bytes after" in message(lambda: read_bytes(tmp_path / "bomb", limit=1 << 20))
    (tmp_path / "plain").write_bytes(bytes(2 << 20))
    assert "larger than 1048576 bytes" in message(lambda: read_bytes(tmp_path / "plain", limit=1 << 20))
    assert files.MAX_BYTES == 16 << 30


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    assert "no such file" in message(lambda: read_bytes(tmp_path / "nothing"))
    assert "is a directory" in message(lambda: read_bytes(tmp_path))
    assert "not a directory" in message(lambda: read_bytes(Path(__file__) / "x"))
    assert "not a file name" in message(lambda: read_bytes("a\0b"))
    assert "name too long" in message(lambda: read_bytes("x" * 5000))


@as_root
def test_a_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "a").chmod(0)
    assert "permission denied" in message(lambda: read_bytes(tmp_path / "a"))


def test_an_endless_source_stops_at_the_limit() -> None:
    if not Path("/dev/zero").exists():
        pytest.skip("no /dev/zero here")
    assert "more than 1048576 bytes" in message(lambda: read_bytes("/dev/zero", limit=1 << 20))


@pytest.mark.parametrize("form", ["json", "npz"])
def test_a_trace_from_a_pipe(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a"
    traces.write(read(BASE), path, to=form)
    code = "import sys, traces; print(traces.read('/dev/stdin').world)"
    with path.open("rb") as file, subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE) as cat:
        done = subprocess.run([sys.executable, "-c", code], stdin=cat.stdout, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize(
    ("head", "content"),
    [
        (b"", "empty"),
        (b"{}", "json"),
        (b"  \n{", "json"),
        (b"\xef\xbb\xbf{", "json"),
        (b"null", "json"),
        (b"PK\x03\x04", "npz"),
        (b"PK\x05\x06", "npz"),
        (b"\x80\x04", "pickle"),
        (b"hello", "unknown"),
        (b"\x00", "unknown"),
    ],
)
def test_sniffing(head: bytes, content: str) -> None:
    assert sniff(head) == content


# Writing


@pytest.mark.parametrize("there", [False, True])
def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, there: bool) -> None:
    path = tmp_path / "out"
    if there:
        path.write_text("before")

    def fail(error: BaseException) -> None:
        with write_atomically(path, force=True) as file:
            file.write(b"half")
            raise error

    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
    with pytest.raises(OutputError, match="no space left"):
        fail(OSError(28, "No space left on device"))
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if there else [])
    if there:
        assert path.read_text() == "before"


def test_a_file_appears_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with write_atomically(path) as file:
        file.write(b"whole")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert len(list(tmp_path.iterdir())) == 1


def test_text_is_utf8_with_line_ends_as_written(tmp_path: Path) -> None:
    with write_atomically(tmp_path / "out", mode="w") as file:
        file.write("é\n\r\n")
    assert (tmp_path / "out").read_bytes() == b"\xc3\xa9\n\r\n"


def test_an_existing_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    with pytest.raises(OutputError, match="exists already; give --force"), write_atomically(path):
        pytest.fail("not reached")
    with write_atomically(path, force=True) as file:
        file.write(b"after")
    assert path.read_text() == "after"


def test_a_file_that_comes_into_being_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"

    def write() -> None:
        with write_atomically(path) as file:
            file.write(b"ours")
            path.write_text("theirs")

    with pytest.raises(OutputError, match="exists already"):
        write()
    assert path.read_text() == "theirs"
    assert len(list(tmp_path.iterdir())) == 1


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    def write(path: str | Path) -> None:
        with write_atomically(path, force=True) as file:
            file.write(b"x")

    assert "there is no folder" in message(lambda: write(tmp_path / "no" / "out"))
    assert "is a directory" in message(lambda: write(tmp_path))
    assert "cannot be written" in message(lambda: write(tmp_path / ("x" * 300)))
    assert "not a file name" in message(lambda: write("a\0b"))
    assert "cannot be written" in message(lambda: write("/proc/nothing"))
    assert list(tmp_path.iterdir()) == []


@as_root
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="permission denied"), write_atomically(tmp_path / "out"):
        pytest.fail("not reached")


@pytest.mark.skipif(not hasattr(os, "umask") or sys.platform == "win32", reason="POSIX permissions")
def test_permissions_are_those_of_any_new_file_or_of_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    with write_atomically(tmp_path / "new"):
        pass
    usual, new = ((tmp_path / name).stat().st_mode for name in ("usual", "new"))
    assert usual == new
    (tmp_path / "new").chmod(0o640)
    with write_atomically(tmp_path / "new", force=True):
        pass
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_link_keeps_pointing(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to("target")
    with write_atomically(tmp_path / "link", force=True) as file:
        file.write(b"after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "after"


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no /dev/null here")
def test_a_device_is_written_in_place() -> None:
    with write_atomically("/dev/null") as file:
        file.write(b"x")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize(("to", "start"), [(None, b'{"format"'), ("npz", b"PK")])
def test_a_dash_is_standard_output(tmp_path: Path, to: str | None, start: bytes) -> None:
    traces.write(read(BASE), tmp_path / "a.json")
    code = f"import traces; traces.write(traces.read({str(tmp_path / 'a.json')!r}), '-', to={to!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=Path(traces.__file__).parent.parent)
    assert done.stderr == b""
    assert done.stdout.startswith(start)


# Words of messages


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (1 << 5000, "an integer of 5001 bits"),
        (1.5, "1.5"),
        ("a\nb", r"'a\nb'"),
        ([1], "a list"),
        ({}, "an object"),
        (b"", "a bytes"),
    ],
)
def test_quoted(value: object, words: str) -> None:
    assert quoted(value) == words


@pytest.mark.parametrize("text", ["x" * 1000, "\n" * 1000, "\u2028\x00" * 100, "é" * 61, "'\"" * 50])
def test_words_are_short_and_on_one_line(text: str) -> None:
    for words in (quoted(text), one_line(text), path_text(text)):
        assert len(words) <= 1300
        assert words.isprintable()
    assert len(quoted(text)) <= 80
    assert len(one_line(text)) <= 160


def test_reading_loads_nothing_heavy() -> None:
    code = "import sys, traces, traces.errors; print([m for m in ('numpy', 'msgspec', 'numba') if m in sys.modules])"
    root = Path(traces.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout == "[]\n"
    code = "import sys, traces; traces.read('traces/samples/ranks.json'); print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout == "False\n"


def test_the_package_has_what_it_lists() -> None:
    for name in traces.__all__:
        assert getattr(traces, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = traces.nothing


def test_errors_are_trace_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError):
        traces.read(tmp_path / "nothing")
