"""What is to be recorded, as it goes to the process that runs the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

#: What that process leaves in the request's folder.
TRACE: Final = "trace.npz"
FACTS: Final = "facts.json"
#: What a program leaves there that has started another.
STARTED: Final = "started.json"
#: Where it was when a signal like SIGSEGV ended it (Python's faulthandler).
FAULT: Final = "fault"
#: So many devices of a node have numbers of their own (c10's FakeGuardImpl); ranks beyond have the first one's.
DEVICES: Final = 8
#: The exit code of a program that was interrupted.
INTERRUPTED: Final = 130
#: Steps: as many as it takes until two of them do the same.
REPEATS: Final = -1


@dataclass(frozen=True, slots=True)
class Request:
    """A program and the GPU it runs on.

    `program` is a path or a module's name (`kind`), and its arguments. `memory` and `context` are bytes
    (memory 0: the card's own); `conf` None: as the environment says. `steps` 0: to the program's end; `REPEATS`: until
    two steps do the same. Each rank of a job has a process of its own, `rank` of `world`, of which each node has
    `processes`; `environment` is what their launcher adds to it, and `local` an argument with the local rank that it
    puts before the program's own. `launched`: ranks are told their places, also where there is one; `begins`: the
    program begins them itself. `watched`: somebody looks at standard error. `late`: memory in use on another stream
    comes back when the host waits. `timed`: kernels take time, and collectives over `interconnect`
    (`strategies.timing.Clock.connected`). `endless`: memory never runs out, although the program is told that the GPU
    has what it has. `on_gpu`: libraries take what they take there, padded products win, and addresses are the driver's
    (`simulator.engine.on_gpu`). `floats`: what floating-point numbers are that the program reads and that have no
    values. `nonzero`: the share of elements that are not zero where nobody knows, of all if None. `exchange`: the
    socket over which it speaks with other ranks' processes, -1 where it has none; `store`: the file in which they keep
    what all can read. `gpus`: how many GPUs the process works on, each of which is told of as a rank
    (`process._told`). `command`: a script that it starts before it has something on a GPU is meant, as is what
    any program starts by a launcher then (`launchers.StartedError`).
    """

    program: tuple[str, ...]
    kind: Literal["script", "module", "notebook"]
    folder: str
    gpu: str
    release: str
    memory: int = 0
    context: int = 0
    conf: str | None = None
    steps: int = REPEATS
    rank: int = 0
    world: int = 1
    watched: bool = False
    processes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    local: str = ""
    launched: bool = False
    begins: bool = False
    late: bool = False
    timed: bool = False
    interconnect: str = ""
    endless: bool = False
    on_gpu: bool = False
    floats: float = 0.0
    nonzero: float | None = None
    exchange: int = -1
    store: str = ""
    gpus: int = 1
    command: bool = False

    @property
    def local_rank(self) -> int:
        """The rank's place on its node."""
        return self.rank % self.processes

    def text(self) -> str:
        """As JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> Request:
        """From JSON."""
        return msgspec.json.decode(text, type=cls)
