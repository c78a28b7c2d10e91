"""Files as every reader and writer of the project opens them: gzip by content, limits on reading, atomic writing.

Reading never goes by a file's name: a stream that begins with gzip's magic bytes is decompressed on the way, and at
most `MAX_BYTES` come out of it. Writing goes to a new file beside the target, which takes the target's place only
when everything has been written, so that no half-written result is ever left.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import secrets
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Literal, cast

from traces.errors import OutputError, TraceError
from traces.text import one_line, path_text

#: Most bytes that are read from one file, after decompression (16 GiB). A guard against decompression bombs.
MAX_BYTES: Final = 16 << 30

Content = Literal["json", "npz", "pickle", "empty", "unknown"]

_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZIP_MAGICS: Final = (b"PK\x03\x04", b"PK\x05\x06")
_UTF8_BOM: Final = b"\xef\xbb\xbf"
_CHUNK: Final = 1 << 20


def sniff(head: bytes) -> Content:
    """What a (decompressed) file holds, by its first bytes; 64 of them are plenty."""
    if head.startswith(_ZIP_MAGICS):
        return "npz"
    if head.startswith(b"\x80"):
        return "pickle"
    if not head:
        return "empty"
    text = head.removeprefix(_UTF8_BOM).lstrip(b" \t\r\n")
    return "json" if text[:1] in b'{["tfn-0123456789' else "unknown"  # blanks may go on before the text begins


class _Gunzip(io.RawIOBase):
    """The decompressed bytes of a gzip stream, with every fault and the size limit as a TraceError."""

    def __init__(self, source: BinaryIO, path: str | os.PathLike[str], limit: int) -> None:
        self._source = source
        self._gzip = gzip.GzipFile(fileobj=source, mode="rb")
        self._path = path
        self._limit = self._left = limit

    def readable(self) -> bool:
        return True

    def _take(self, size: int) -> bytes:
        name = path_text(self._path)
        try:
            data = self._gzip.read(size)
        except EOFError:
            raise TraceError(f"{name}: the gzip data is truncated; copy or record the file again") from None
        except (OSError, zlib.error) as error:
            raise TraceError(f"{name}: damaged gzip data ({one_line(error)})") from None
        self._left -= len(data)
        if self._left < 0:
            raise TraceError(f"{name}: more than {_size(self._limit)} after decompression; refused")
        return data

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._take(len(view))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        parts = []
        while data := self._take(_CHUNK):
            parts.append(data)
        return b"".join(parts)

    def close(self) -> None:
        if not self.closed:
            self._gzip.close()
            self._source.close()
        super().close()


def _size(limit: int) -> str:
    return f"{limit >> 30} GiB" if limit >= 1 << 30 else f"{limit} bytes"


def _reason(error: OSError) -> str:
    """Why an operating system call failed, in its own words, without the path."""
    return (error.strerror or one_line(error)).lower()


def open_maybe_gzip(path: str | os.PathLike[str], *, limit: int = MAX_BYTES) -> io.BufferedReader:
    """Open a file for reading bytes, decompressing where its content is gzip's (whatever its name).

    At most `limit` bytes (after decompression) can be read. The caller closes it.
    Raises TraceError where the file cannot be opened, and on reading where gzip data are damaged or truncated.
    """
    name = path_text(path)
    try:
        source = open(path, "rb")  # noqa: SIM115 (handed to the caller, or closed below)
    except OSError as error:
        raise TraceError(f"{name}: cannot be read: {_reason(error)}") from None
    except ValueError:  # a zero byte in the path
        raise TraceError(f"{name}: not a file name") from None
    try:
        if source.peek(2)[:2] == _GZIP_MAGIC:
            return io.BufferedReader(cast(Any, _Gunzip(source, path, limit)), _CHUNK)
        if os.fstat(source.fileno()).st_size > limit:
            raise TraceError(f"{name}: larger than {_size(limit)}; refused")
    except OSError as error:
        source.close()
        raise TraceError(f"{name}: cannot be read: {_reason(error)}") from None
    except TraceError:
        source.close()
        raise
    return source


def read_bytes(path: str | os.PathLike[str], *, limit: int = MAX_BYTES) -> bytes:
    """The whole content of a file, decompressed where it is gzip's; at most `limit` bytes.

    Raises TraceError where the file is missing, a directory, unreadable, damaged, truncated or larger than the limit.
    """
    with open_maybe_gzip(path, limit=limit) as stream:
        return read_stream(stream, path, limit=limit)


def read_stream(stream: io.BufferedReader, path: str | os.PathLike[str], *, limit: int = MAX_BYTES) -> bytes:
    """The rest of a stream of `open_maybe_gzip`; errors as `read_bytes`."""
    parts, size = [], 0
    try:
        while data := stream.read(_CHUNK << 4):
            parts.append(data)
            size += len(data)
            if size > limit:  # an endless pipe or device
                raise TraceError(f"{path_text(path)}: more than {_size(limit)}; refused")
        return parts[0] if len(parts) == 1 else b"".join(parts)
    except OSError as error:
        raise TraceError(f"{path_text(path)}: cannot be read: {_reason(error)}") from None
    except MemoryError:
        raise TraceError(f"{path_text(path)}: does not fit in this machine's memory") from None


@contextlib.contextmanager
def write_atomically(
    path: str | os.PathLike[str], *, force: bool = False, mode: Literal["wb", "w"] = "wb"
) -> Iterator[IO[Any]]:
    """Open a file to write that appears under its name only when the block ends without an error.

    The bytes go to a new file in the same folder, which then replaces the target (a symbolic link's target, not the
    link); on any error it is removed and a file that was there before is left as it was. `-` writes to standard
    output; pipes and devices are written directly. `mode` "w" is text in UTF-8, with line ends as written.
    Raises OutputError where the file exists and `force` is not given, or cannot be written.
    """
    if os.fspath(path) == "-":
        yield sys.stdout.buffer if mode == "wb" else sys.stdout
        return
    name = path_text(path)
    try:
        target = Path(os.path.realpath(path))
        special = target.exists() and not stat.S_ISREG(target.stat().st_mode)
        if not special:
            _may_take(target, name, force)
    except (OSError, ValueError) as error:
        reason = _reason(error) if isinstance(error, OSError) else "not a file name"
        raise OutputError(f"{name}: cannot be written: {reason}") from None
    if special:
        yield from _write_special(target, name, mode)
    else:
        yield from _write_beside(target, name, force, mode)


def _may_take(target: Path, name: str, force: bool) -> None:
    """Refuse a target that exists already (without `force`) or whose folder does not."""
    if target.exists() and not force:
        raise OutputError(f"{name}: exists already; give --force to replace it")
    if not target.parent.is_dir():
        raise OutputError(f"{name}: cannot be written: there is no folder {path_text(target.parent)}")


def _options(mode: str) -> dict[str, Any]:
    return {} if "b" in mode else {"encoding": "utf-8", "newline": ""}


def _write_special(target: Path, name: str, mode: str) -> Iterator[IO[Any]]:
    """Write to a pipe or device in place; a directory is an error."""
    try:
        with open(target, mode, **_options(mode)) as file:
            yield file
    except OSError as error:
        raise OutputError(f"{name}: cannot be written: {_reason(error)}") from None


def _write_beside(target: Path, name: str, force: bool, mode: str) -> Iterator[IO[Any]]:
    """Write a new file in the target's folder and let it take the target's place at the end."""
    beside = target.parent / f".llmem-{secrets.token_hex(8)}.tmp"
    try:
        try:
            with open(beside, mode.replace("w", "x"), **_options(mode)) as file:
                yield file
            if target.exists():
                _may_take(target, name, force)
                os.chmod(beside, stat.S_IMODE(target.stat().st_mode))
            os.replace(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except OSError as error:
        raise OutputError(f"{name}: cannot be written: {_reason(error)}") from None
