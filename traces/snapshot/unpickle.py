"""Reading a pickle that may come from anyone: nothing but builtin containers, text and numbers can be built.

A memory snapshot holds dicts, lists, tuples, str, int, float, bool and None. `load_builtins` first walks over the
opcodes without executing them: opcodes that name or call anything, ask for extension codes or persistent objects, or
declare more bytes than the file has are refused, and so is what would make the C unpickler itself misbehave: a memo
index that asks for gigabytes, and tuples of anything but two integers (the hash of a tower of tuples, used as a key,
overflows the C stack or never ends). Only then the standard C unpickler runs, with a `find_class` that always refuses.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Final, NoReturn

from traces.errors import TraceError
from traces.text import one_line, quoted

#: Integers are 64 bits wide, signed or not; among wider ones thousands share a hash, which stalls a dict.
MAX_INT_DIGITS: Final = 20

_LINE: Final = -1  # one argument, up to the end of the line
_COUNT1: Final = -2  # a count of 1 byte, then as many bytes
_COUNT4: Final = -3
_COUNT8: Final = -4
_LONG_TEXT: Final = -5
_MEMO_TEXT: Final = -6
_MEMO4: Final = -7
_LONG1: Final = -8
_LONG4: Final = -9
_TUPLE2: Final = -10
_TUPLE: Final = -11
_STOP: Final = -12
_REFUSED: Final = -13

#: Opcodes with arguments of a fixed width, in bytes.
_FIXED: Final = {
    **dict.fromkeys(b"(012)]}ldaeus", 0),  # MARK POP POP_MARK DUP EMPTY_*; LIST DICT APPEND(S) SETITEM(S)
    **dict.fromkeys(b"N\x88\x89\x94", 0),  # NONE NEWTRUE NEWFALSE MEMOIZE
    **dict.fromkeys(b"K\x80hq", 1),  # BININT1 PROTO BINGET BINPUT
    **dict.fromkeys(b"M", 2),  # BININT2
    **dict.fromkeys(b"Jj", 4),  # BININT LONG_BINGET
    **dict.fromkeys(b"G\x95", 8),  # BINFLOAT FRAME
}
_SPECIAL: Final = {
    **dict.fromkeys(b"FSVg", _LINE),  # FLOAT STRING UNICODE GET
    **dict.fromkeys(b"IL", _LONG_TEXT),  # INT LONG
    ord("p"): _MEMO_TEXT,  # PUT
    ord("r"): _MEMO4,  # LONG_BINPUT
    **dict.fromkeys(b"\x8cUC", _COUNT1),  # SHORT_BINUNICODE SHORT_BINSTRING SHORT_BINBYTES
    **dict.fromkeys(b"XTB", _COUNT4),  # BINUNICODE BINSTRING BINBYTES
    **dict.fromkeys(b"\x8d\x8e", _COUNT8),  # BINUNICODE8 BINBYTES8
    0x8A: _LONG1,
    0x8B: _LONG4,
    0x86: _TUPLE2,
    **dict.fromkeys(b"t\x85\x87", _TUPLE),  # TUPLE TUPLE1 TUPLE3
    ord("."): _STOP,
}
_WIDTH: Final = tuple(_SPECIAL.get(op, _FIXED.get(op, _REFUSED)) for op in range(256))
_INTS: Final = frozenset(b"KMJ\x8a")
_EXTENSIONS: Final = b"\x82\x83\x84"
_PERSISTENT: Final = b"PQ"
_GLOBALS: Final = b"ci"  # GLOBAL INST: module and name follow as lines
_STACK_GLOBAL: Final = 0x93
_FRAME: Final = 0x95
_PLAIN: Final = "refused; a memory snapshot holds only plain data"


class _Refused(pickle.UnpicklingError):
    """The pickle asks for something by name."""


class _PlainUnpickler(pickle.Unpickler):
    """The C unpickler, without the means to find anything outside the file."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise _Refused(f"asks for {quoted(f'{module_name}.{global_name}')}: {_PLAIN}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise _Refused(f"asks for a persistent object: {_PLAIN}")


def load_builtins(data: bytes, where: str) -> Any:
    """What the pickle `data` holds, made of builtin types only; `where` names the file in errors.

    No code of the file's choosing is ever run. Raises TraceError, one line, for anything that is not a whole pickle
    of plain data: a truncated or damaged file, a global, extension code or persistent object asked for, lengths or
    nesting that only an attack needs.
    """
    try:
        _walk(data)
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _Refused as error:
        raise TraceError(f"{where}: {error}") from None
    except (EOFError, IndexError):
        raise TraceError(f"{where}: the pickle is truncated or damaged; copy or record the file again") from None
    except MemoryError:
        raise TraceError(f"{where}: the pickle does not fit in this machine's memory") from None
    except Exception as error:  # the unpickler raises whatever a damaged stack leads it to
        raise TraceError(f"{where}: not a readable pickle ({one_line(error) or type(error).__name__})") from None


def _walk(data: bytes) -> None:
    """Step over the opcodes up to STOP; raise where one is refused, or does not lie whole inside `data`."""
    width = _WIDTH
    at = 0
    before = last = 0  # the two opcodes before this one
    while True:
        op = data[at]
        step = width[op]
        if step >= 0:
            at += 1 + step
        elif step == _STOP:
            return
        elif step in (_TUPLE2, _TUPLE):
            if step == _TUPLE or last not in _INTS or before not in _INTS:
                raise _Refused("holds a tuple that is not a pair of integers: a memory snapshot has none")
            at += 1
        elif step == _REFUSED:
            _refuse(data, at)
        else:
            at = _argument_end(data, at, step)
        if op != _FRAME:
            before, last = last, op


def _argument_end(data: bytes, at: int, step: int) -> int:
    """Where the opcode at `at`, whose argument has no fixed width, ends."""
    if step in (_LINE, _LONG_TEXT, _MEMO_TEXT):
        end = data.find(b"\n", at)
        if end < 0:
            raise EOFError
        if step == _LONG_TEXT and end - at > MAX_INT_DIGITS + 3:  # sign and L apart
            raise pickle.UnpicklingError("an integer of more than 64 bits")
        if step == _MEMO_TEXT:
            _check_memo(data[at + 1 : end], at)
        return end + 1
    if step == _MEMO4:
        _check_memo(str(int.from_bytes(data[at + 1 : at + 5], "little")).encode(), at)
        return at + 5
    count_bytes = {_COUNT1: 1, _COUNT4: 4, _COUNT8: 8, _LONG1: 1, _LONG4: 4}[step]
    count = int.from_bytes(data[at + 1 : at + 1 + count_bytes], "little")
    end = at + 1 + count_bytes + count
    if step in (_LONG1, _LONG4) and (count > 9 or (count == 9 and data[at + 1 + count_bytes + 8 : end] != b"\0")):
        raise pickle.UnpicklingError("an integer of more than 64 bits")
    if end > len(data):
        raise EOFError
    return end


def _check_memo(digits: bytes, at: int) -> None:
    """A memo index above the number of bytes so far only asks the unpickler for memory."""
    if len(digits) > 12 or not digits.strip().isdigit() or int(digits) > at:
        raise pickle.UnpicklingError("a memo index that no pickle of this size needs")


def _refuse(data: bytes, at: int) -> NoReturn:
    """Say what the refused opcode at `at` asks for."""
    op = data[at]
    if op in _GLOBALS:
        lines = data[at + 1 : at + 400].split(b"\n")
        name = b".".join(lines[:2]).decode("ascii", "replace")
        raise _Refused(f"asks for {quoted(name)}: {_PLAIN}")
    if op == _STACK_GLOBAL:
        # All before it has been walked over: let the unpickler take the names from its stack, and refuse them.
        _PlainUnpickler(io.BytesIO(data)).load()
    if op in _EXTENSIONS:
        raise _Refused(f"asks for an object by extension code: {_PLAIN}")
    if op in _PERSISTENT:
        raise _Refused(f"asks for a persistent object: {_PLAIN}")
    raise _Refused(f"asks for opcode 0x{op:02x}: {_PLAIN}")
