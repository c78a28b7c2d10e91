"""The unpickler builds plain data, and nothing else, whatever the file asks for."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import struct
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.snapshots import NAMES, data_of
from traces.errors import TraceError
from traces.snapshot.unpickle import _WIDTH, load_builtins

#: Opcodes with an argument of fixed width, or none, that are refused or treated apart.
SPECIAL_NAMES = (
    "STOP TUPLE TUPLE1 TUPLE2 TUPLE3 LONG_BINPUT BYTEARRAY8 NEXT_BUFFER READONLY_BUFFER EMPTY_SET ADDITEMS FROZENSET "
    "STACK_GLOBAL REDUCE BUILD OBJ NEWOBJ NEWOBJ_EX BINPERSID EXT1 EXT2 EXT4"
)
SPECIAL = SPECIAL_NAMES.split()

plain_data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def refusal(data: bytes) -> str:
    with pytest.raises(TraceError) as caught:
        load_builtins(data, "file.pickle")
    text = str(caught.value)
    assert text.startswith("file.pickle: ")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", NAMES)
def test_real_snapshots_load_as_with_pickle(name: str) -> None:
    assert load_builtins(data_of(name), name) == pickle.loads(data_of(name))


@given(plain_data, st.integers(2, 5))
def test_plain_data_loads_as_with_pickle(value: Any, protocol: int) -> None:
    assert load_builtins(pickle.dumps(value, protocol=protocol), "f") == value


class Caller:
    """Unpickling this would run a shell command."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_call_is_refused_by_name(protocol: int) -> None:
    text = refusal(pickle.dumps({"segments": [Caller()]}, protocol=protocol))
    assert f"asks for '{os.name}.system': refused; a memory snapshot holds only plain data" in text


def test_a_name_kept_in_the_memo_is_said_too() -> None:
    data = b"\x80\x04\x8c\x02os\x94\x8c\x06system\x940(h\x00h\x01\x93."
    assert "'os.system'" in refusal(data)


@pytest.mark.parametrize("value", [OrderedDict(a=1), {1, 2}, frozenset((1,)), bytearray(b"x"), 1j, range(3), Exception])
def test_other_types_are_refused(value: Any) -> None:
    for protocol in range(2, 6):
        refusal(pickle.dumps([value], protocol=protocol))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (b"\x80", "truncated"),
        (b"\x80\x04N", "truncated"),
        (b"\x80\x04\x8c\x09abc.", "truncated"),
        (b"\x80\x04X\xff\xff\xff\x7fabc.", "truncated"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"N.", "truncated"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b"N.", "refused"),
        (b"\x80\x04\x8b\xff\xff\xff\x7fN.", "64 bits"),
        (b"L" + b"9" * 5000 + b"L\n.", "64 bits"),
        (b"I" + b"9" * 5000 + b"\n.", "64 bits"),
        (b"Ix\n.", "not a readable pickle"),
        (b"\x80\x02Nr\xff\xff\xff\xff.", "memo index"),
        (b"Np99999999999999\n.", "memo index"),
        (b"Np-1\n.", "memo index"),
        (b"\x80\x04h\x07.", "not a readable pickle"),
        (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "not a readable pickle"),
        (b"\x80\x63N.", "protocol"),
        (b"\x80\x04.", "not a readable pickle"),
        (b"\x80\x04}]Ns.", "not a readable pickle"),
        (b"\x80\x04\x82\x01.", "extension code"),
        (b"\x80\x04\x84\x01\x00\x00\x00.", "extension code"),
        (b"Pid\n.", "persistent object"),
        (b"\x80\x04NQ.", "persistent object"),
        (b"\x80\x04)R.", "opcode 0x52"),
        (b"\x80\x04\xff.", "opcode 0xff"),
        (b"(iposix\nsystem\n.", "'posix.system'"),
        (b"cposix\nsys\xe4tem\n.", "asks for"),
    ],
)
def test_damage_and_bombs_are_one_line(data: bytes, says: str) -> None:
    assert says in refusal(data)


def test_the_walk_steps_over_arguments_as_pickle_does() -> None:
    """Otherwise something could hide in an argument, or an argument be taken for opcodes."""
    for opcode in pickletools.opcodes:
        width = _WIDTH[ord(opcode.code)]
        size = opcode.arg.n if opcode.arg else 0
        if width >= 0:
            assert width == size, opcode.name
        elif size >= 0:  # refused or looked at more closely
            assert opcode.name in SPECIAL, opcode.name


def test_a_tower_of_tuples_as_a_key_does_not_overflow_the_stack() -> None:
    assert "tuple" in refusal(b"\x80\x04}" + b")" + b"\x85" * 2_000_000 + b"Ns.")


def test_tuples_that_share_their_parts_are_refused() -> None:
    """Sixty levels of (t, t) hash for ever as a key."""
    assert "tuple" in refusal(b"\x80\x04}K\x01" + b"2\x86" * 60 + b"Ns.")


def test_ints_before_a_tuple_cannot_be_imitated() -> None:
    """The bytes of an argument look like two integers; the tuple holds something else."""
    assert "tuple" in refusal(b"\x80\x04)\x85\x8a\x04K\x00K\x00\x86.")


def test_a_million_nested_lists_do_no_harm() -> None:
    value = load_builtins(b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".", "f")
    assert isinstance(value, list)


@given(st.binary(max_size=200))
def test_any_bytes_load_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(TraceError):
        load_builtins(b"\x80\x04" + data, "f")
