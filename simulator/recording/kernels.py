"""One event at a time through the compiled allocator, written down as it is served."""

from __future__ import annotations

from simulator.allocator import layout as at
from simulator.engine import kernels as engine
from traces.jit import kernel, pointer
from traces.model import Int64Array

#: Columns of the history: op, dense id (-1: none), the op's number, dense stream.
COLUMNS = 4
(H_OP, H_IDENT, H_ARG, H_STREAM) = range(COLUMNS)


@kernel
def serve_event(
    memory: Int64Array, id_table: Int64Array, history: Int64Array, row: int, op: int, ident: int, arg: int, stream: int
) -> int:
    """Serve one event and enter it as `row` of the history; its status, as of `engine.kernels.run`.

    After GROW nothing has happened: the memory needs room first.
    """
    m = pointer(memory)
    if not engine.has_room(m):
        return at.GROW
    out = pointer(history)
    place = row * COLUMNS
    out[place + H_OP] = op
    out[place + H_IDENT] = ident
    out[place + H_ARG] = arg
    out[place + H_STREAM] = stream
    m[at.EVENT] = row
    status, _ = engine.serve(m, pointer(id_table), op, ident, arg, stream, False)
    if m[at.STOPPED] != 0:
        return at.FAILED
    return status
