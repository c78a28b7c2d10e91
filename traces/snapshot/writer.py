"""Memory snapshots as files that PyTorch's own tools open: the viewer (MemoryViz.js) and `torch.cuda._memory_viz`.

The viewer has an unpickler of its own, which knows few opcodes, and it draws what it can rewind: from the final
segments back through the trace. `write_snapshot` writes plain builtins with pickle protocol 4.
"""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import numpy as np

from traces.errors import OutputError
from traces.files import write_atomically
from traces.text import path_text

PROTOCOL: Final = 4


def write_snapshot(snapshot: Mapping[str, Any], path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a snapshot (torch's layout) as a pickle of protocol 4; gzipped where the path ends in `.gz`.

    Numbers of numpy become plain ones. Nothing appears under the path before all is written. Raises OutputError where
    the file exists and `force` is not given, cannot be written, or where the snapshot holds more than plain data.
    """
    try:
        data = pickle.dumps(plain(snapshot), protocol=PROTOCOL)
    except RecursionError:
        raise OutputError(f"{path_text(path)}: the snapshot is nested too deeply to be written") from None
    except TypeError as error:
        raise OutputError(f"{path_text(path)}: {error}") from None
    with write_atomically(path, force=force) as file:
        if path_text(path).endswith(".gz"):
            _compress(data, file)
        else:
            file.write(data)


def _compress(data: bytes, file: IO[bytes]) -> None:
    """Gzip without a name or a time, so that equal snapshots are equal files."""
    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as stream:
        stream.write(data)


def plain(value: object) -> Any:
    """`value` in dict, list, tuple, str, int, float, bool and None alone; TypeError where it holds anything else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [plain(item) for item in value]
    raise TypeError(f"a snapshot holds only plain data, not a {type(value).__name__}")
