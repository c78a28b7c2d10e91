"""The `.npz` form: layout, what else is accepted, and damaged or malicious archives."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
import pytest

from tests.support.strategies import as_trace, same_trace
from tests.traces.forms.test_native import BASE, message, npz_bytes
from traces.errors import EventError
from traces.forms.columnar import read_npz, write_npz
from traces.model import Op

TRACE = as_trace(BASE)


def arrays() -> dict[str, Any]:
    """The arrays of a good archive."""
    with np.load(io.BytesIO(npz_bytes(TRACE)), allow_pickle=False) as archive:
        return dict(archive)


def saved(members: dict[str, Any], *, compressed: bool = False) -> io.BytesIO:
    file = io.BytesIO()
    save: Any = np.savez_compressed if compressed else np.savez
    save(file, **members)
    file.seek(0)
    return file


def zipped(members: dict[str, bytes]) -> io.BytesIO:
    """An archive of raw member bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    file.seek(0)
    return file


def npy(array: Any, *, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array), allow_pickle=allow_pickle)
    return file.getvalue()


def members(**changed: bytes) -> dict[str, bytes]:
    good = {f"{name}.npy": npy(array) for name, array in arrays().items()}
    return good | {f"{name.replace('_', '.')}.npy": data for name, data in changed.items()}


def test_the_layout_is_what_the_module_says() -> None:
    found = arrays()
    document = json.loads(found["trace"].tobytes())
    assert document["ranks"][0]["events"]["length"] == 13
    assert document["ranks"][0]["events"]["strings"]["name"] == ["forward", "a"]
    assert found["0.op"].dtype == np.uint8
    assert found["0.op"][1] == Op.ALLOC
    assert found["0.id"].dtype == np.int64
    assert found["0.name"].dtype == np.int32
    assert "0.flops" not in found


def test_columns_are_writable_arrays() -> None:
    """Read-only arrays are another type to numba."""
    for column in read_npz(io.BytesIO(npz_bytes(TRACE))).ranks[0].events.columns.values():
        array: Any = getattr(column, "codes", column)
        assert array.flags.writeable
        assert array.flags.c_contiguous
        assert array.flags.aligned


@pytest.mark.parametrize("compressed", [False, True])
def test_other_writers_and_other_integers(compressed: bool) -> None:
    found = arrays()
    found["0.id"] = found["0.id"].astype(np.int16)
    found["0.bytes"] = found["0.bytes"].astype(np.uint64)
    found["0.op"] = found["0.op"].astype(np.int32)
    found["0.fraction"] = found["0.fraction"].astype(np.float32)
    assert same_trace(read_npz(saved(found, compressed=compressed)), TRACE)


def test_written_compressed() -> None:
    file = io.BytesIO()
    write_npz(TRACE, file, compressed=True)
    assert same_trace(read_npz(file), TRACE)


def test_a_stream_that_cannot_seek_is_written_whole() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    pipe = Pipe()
    write_npz(TRACE, pipe)
    assert same_trace(read_npz(io.BytesIO(pipe.getvalue())), TRACE)


def test_a_needed_column_that_is_not_there() -> None:
    found = arrays()
    del found["0.bytes"]
    with pytest.raises(EventError, match="rank 0, event 1, field 'bytes': missing; 'alloc' needs it"):
        read_npz(saved(found))


def test_faults_of_events_are_those_of_json() -> None:
    found = arrays()
    found["0.id"][4] = 99
    with pytest.raises(EventError, match="rank 0, event 4, field 'id': free of an unknown id"):
        read_npz(saved(found))
    found = arrays()
    found["0.op"][3] = 77
    with pytest.raises(EventError, match="rank 0, event 3, field 'op': there is no op of number 77"):
        read_npz(saved(found))


def changed(name: str, array: Any) -> io.BytesIO:
    return saved(arrays() | {name: np.asarray(array)})


def with_document(**events: Any) -> io.BytesIO:
    """An archive whose JSON says something else of the events of rank 0."""
    found = arrays()
    document = json.loads(found["trace"].tobytes())
    document["ranks"][0]["events"] |= events
    found["trace"] = np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)
    return saved(found)


HUGE = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '<i8', 'fortran_order': False, 'shape': (1152921504606846975,), }".ljust(117)
    + b"\n"
)
NESTED = b"\x93NUMPY\x01\x00\xe8\x03" + b"(" * 999 + b"\n"

BAD: dict[str, tuple[Any, str]] = {
    "object array": (
        lambda: zipped(members(**{"0_id": npy(np.array([{}], object), allow_pickle=True)})),
        "list of num",
    ),
    "structured": (lambda: changed("0.id", np.zeros(13, dtype=[("a", "i4")])), "must be a list of numbers"),
    "text": (lambda: changed("0.id", ["a"] * 13), "must be a list of numbers"),
    "complex": (lambda: changed("0.id", np.zeros(13, dtype=complex)), "must be a list of numbers"),
    "big endian": (lambda: changed("0.id", np.zeros(13, dtype=">i8")), "must be a list of numbers"),
    "two dimensions": (lambda: changed("0.id", np.zeros((13, 1), dtype=np.int64)), "must be a list of numbers"),
    "no dimension": (lambda: changed("0.id", np.int64(3)), "must be a list of numbers"),
    "floats for integers": (lambda: changed("0.id", np.zeros(13)), "array '0.id': must be of int64, is of float64"),
    "truths for integers": (lambda: changed("0.id", np.zeros(13, bool)), "array '0.id': must be of int64, is of bool"),
    "integers for truths": (lambda: changed("0.hold", np.zeros(13, int)), "array '0.hold': must be of bool"),
    "ids beyond 63 bits": (lambda: changed("0.id", np.full(13, 1 << 63, np.uint64)), "has values outside"),
    "ops beyond a byte": (lambda: changed("0.op", np.full(13, 256)), "array '0.op': has values outside 0 to 255"),
    "wrong length": (lambda: changed("0.id", np.zeros(12, int)), "column 'id' has 12 values, 'op' has 13"),
    "codes outside": (lambda: changed("0.name", np.full(13, 9, np.int32)), "codes outside its table"),
    "codes below": (lambda: changed("0.name", np.full(13, -2, np.int32)), "codes outside its table"),
    "no document": (lambda: saved({"x": np.zeros(1)}), "the archive has no 'trace.npy'"),
    "an empty archive": (lambda: zipped({}), "the archive has no 'trace.npy'"),
    "document not JSON": (lambda: changed("trace", np.zeros(4, np.uint8)), "not valid JSON"),
    "document of floats": (lambda: changed("trace", np.zeros(4)), "array 'trace': must be of uint8"),
    "no op": (lambda: zipped({k: v for k, v in members().items() if k != "0.op.npy"}), "no '0.op.npy'"),
    "no table": (lambda: with_document(strings={}), "the table of texts of column"),
    "table of numbers": (lambda: with_document(strings={"name": [1], "category": [2], "group": []}), "table of texts"),
    "wrong count": (lambda: with_document(length=5), "'length' is 5, the columns have 13 values"),
    "extra no object": (lambda: with_document(extra=[]), "'extra' must be an object"),
    "extra no pairs": (lambda: with_document(extra={"a": [1]}), "must be a list of [event, value] pairs"),
    "extra outside": (lambda: with_document(extra={"a": [[13, 0]]}), "must be a list of [event, value] pairs"),
    "extra of a known field": (lambda: with_document(extra={"id": [[1, 0]]}), "'id' is a field of the format"),
    "a huge shape": (lambda: zipped(members(**{"0_id": HUGE})), "its shape does not agree with its size"),
    "deep header": (lambda: zipped(members(**{"0_id": NESTED})), "damaged .npz array '0.id'"),
    "no header": (lambda: zipped(members(**{"0_id": b""})), "damaged .npz array '0.id'"),
    "a short array": (lambda: zipped(members(**{"0_id": npy(np.zeros(13, int))[:-3]})), "shape does not agree"),
    "a long array": (lambda: zipped(members(**{"0_id": npy(np.zeros(13, int)) + b"x"})), "shape does not agree"),
    "truths of 2": (
        lambda: zipped(members(**{"0_hold": npy(np.zeros(13, bool))[:-1] + b"\x02"})),
        "other than true and false",
    ),
    "cut off": (lambda: io.BytesIO(npz_bytes(TRACE)[:-100]), "damaged .npz archive"),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_and_malicious_archives(name: str) -> None:
    make, words = BAD[name]
    assert words in message(lambda: read_npz(make()))


def test_a_flipped_bit_shows_in_the_checksum() -> None:
    data = bytearray(npz_bytes(TRACE))
    at = data.index(np.int64(1000).tobytes())
    data[at] ^= 1
    assert "CRC" in message(lambda: read_npz(io.BytesIO(bytes(data))))


def test_a_bomb_is_refused_by_what_it_declares() -> None:
    found = arrays() | {"bomb": np.zeros(1 << 24, dtype=np.uint8)}
    file = saved(found, compressed=True)
    assert len(file.getvalue()) < 1 << 17
    assert "unpacks to more than 1048576 bytes; refused" in message(lambda: read_npz(file, limit=1 << 20))


def test_a_member_that_lies_about_its_size_gives_no_more_than_it_declares() -> None:
    """A small declared size over a large deflated body: no more is unpacked than the array's own length."""
    good = members()
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in good.items():
            archive.writestr(name, data + bytes(1 << 24) if name == "0.id.npy" else data)
    raw = file.getvalue()
    true, lie = (len(good["0.id.npy"]) + (1 << 24)).to_bytes(4, "little"), len(good["0.id.npy"]).to_bytes(4, "little")
    assert raw.count(true) == 2
    assert "damaged .npz array '0.id'" in message(lambda: read_npz(io.BytesIO(raw.replace(true, lie))))


def test_an_encrypted_archive() -> None:
    data = bytearray(npz_bytes(TRACE))
    entry = data.index(b"PK\x01\x02")
    data[entry + 8] |= 1
    local = 6
    data[local] |= 1
    assert "damaged .npz" in message(lambda: read_npz(io.BytesIO(bytes(data))))
