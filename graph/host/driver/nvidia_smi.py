"""`nvidia-smi` of GPUs that are not there: a program of its own, which imports nothing of this project.

Its first argument is a file that `graph.host.driver.smi` writes: what is known of each GPU. The others are those of
nvidia-smi: none for the table, `-L`, `--query-gpu=... --format=csv[,noheader][,nounits]`, `--query-compute-apps`, each
with `-i`. What the driver measures is 0, and what it sets is not set.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

Gpu = Mapping[str, Any]

_MIB: Final = 1 << 20
#: Fields of --query-gpu, and their units where they have some; shorter names stand for the same.
_FIELDS: Final[dict[str, tuple[Callable[[Gpu], object], str]]] = {
    "index": (lambda gpu: gpu["index"], ""),
    "name": (lambda gpu: gpu["name"], ""),
    "uuid": (lambda gpu: gpu["uuid"], ""),
    "count": (lambda gpu: gpu["count"], ""),
    "timestamp": (lambda gpu: time.strftime("%Y/%m/%d %H:%M:%S.000"), ""),
    "driver_version": (lambda gpu: gpu["driver"], ""),
    "compute_cap": (lambda gpu: gpu["capability"], ""),
    "pci.bus_id": (lambda gpu: _bus(gpu), ""),
    "memory.total": (lambda gpu: gpu["total"] // _MIB, "MiB"),
    "memory.used": (lambda gpu: gpu["used"] // _MIB, "MiB"),
    "memory.free": (lambda gpu: (gpu["total"] - gpu["used"]) // _MIB, "MiB"),
    "memory.reserved": (lambda gpu: 0, "MiB"),
    "utilization.gpu": (lambda gpu: 0, "%"),
    "utilization.memory": (lambda gpu: 0, "%"),
    "temperature.gpu": (lambda gpu: 0, ""),
    "power.draw": (lambda gpu: "0.00", "W"),
    "pstate": (lambda gpu: "P0", ""),
    "persistence_mode": (lambda gpu: "Enabled", ""),
    "display_mode": (lambda gpu: "Disabled", ""),
    "display_active": (lambda gpu: "Disabled", ""),
    "compute_mode": (lambda gpu: "Default", ""),
    "mig.mode.current": (lambda gpu: "Disabled", ""),
}
_SHORT: Final = {"gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id"}
#: What the driver knows and nobody says here.
_UNSAID: Final = ("power.", "clocks.", "temperature.", "fan.", "ecc.", "enforced.", "serial", "gpu_serial", "vbios")
_RULE: Final = "+" + 89 * "-" + "+"
_COLUMNS: Final = "+" + 41 * "-" + "+" + 24 * "-" + "+" + 22 * "-" + "+"
_HEAD: Final = (
    _COLUMNS,
    "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
    "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
    "|                                         |                        |               MIG M. |",
    "|" + _COLUMNS[1:-1].replace("-", "=") + "|",
)
_PROCESSES: Final = (
    _RULE,
    "| Processes:                                                                              |",
    "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |",
    "|        ID   ID                                                               Usage      |",
    "|" + 89 * "=" + "|",
    "|  No running processes found                                                             |",
    _RULE,
)


def main(arguments: Sequence[str]) -> int:
    """Print what is asked for; the exit code."""
    gpus: list[Gpu] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    asked, others = _parser().parse_known_args(arguments[1:])
    if others:
        print(f"nvidia-smi of a GPU that is not there knows nothing of {' '.join(others)}", file=sys.stderr)
        return 2
    fields = [_SHORT.get(field.strip(), field.strip()) for field in (asked.query_gpu or "").split(",")]
    for field in fields if asked.query_gpu else ():
        if field not in _FIELDS and not field.startswith(_UNSAID):
            print(f'Field "{field}" is not a valid field to query.\n')
            return 2
    if asked.id is not None:
        named = asked.id.split(",")
        gpus = [gpu for gpu in gpus if str(gpu["index"]) in named or gpu["uuid"] in named]
    options = {option.strip() for option in asked.format.split(",")}
    if asked.list_gpus:
        lines = [f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})" for gpu in gpus]
    elif asked.query_compute_apps:
        lines = _csv(asked.query_compute_apps.split(","), options, [])
    else:
        lines = _csv(fields, options, gpus) if asked.query_gpu else _table(gpus)
    print(*lines, sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("nvidia-smi", allow_abbrev=False)
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("-i", "--id")
    parser.add_argument("--query-gpu")
    parser.add_argument("--query-compute-apps")
    parser.add_argument("--format", default="csv")
    parser.add_argument("-l", "--loop", nargs="?", help="once, here")
    return parser


def _csv(fields: Sequence[str], options: Container[str], gpus: Sequence[Gpu]) -> list[str]:
    bare = "nounits" in options
    lines = [", ".join(field if bare else _titled(field) for field in fields)]
    lines += [", ".join(_value(field, gpu, bare=bare) for field in fields) for gpu in gpus]
    return lines["noheader" in options :]


def _titled(field: str) -> str:
    unit = _FIELDS[field][1] if field in _FIELDS else ""
    return f"{field} [{unit}]" if unit else field


def _value(field: str, gpu: Gpu, *, bare: bool) -> str:
    if field not in _FIELDS:
        return "[N/A]"
    value, unit = _FIELDS[field]
    return f"{value(gpu)} {unit}" if unit and not bare else str(value(gpu))


def _bus(gpu: Gpu) -> str:
    return f"00000000:{gpu['index'] + 1:02X}:00.0"


def _table(gpus: Sequence[Gpu]) -> list[str]:
    first = gpus[0] if gpus else {"driver": "", "cuda": ""}
    version = f"NVIDIA-SMI {first['driver']:<23}Driver Version: {first['driver']:<15}CUDA Version: {first['cuda']}"
    lines = [time.strftime("%a %b %d %H:%M:%S %Y"), _RULE, f"| {version:<88}|", *_HEAD]
    for gpu in gpus:
        memory = f"{gpu['used'] // _MIB}MiB / {gpu['total'] // _MIB:>6}MiB"
        lines += [
            f"| {gpu['index']:>3}  {gpu['name'][:28]:<28}   On  |   {_bus(gpu)} Off |                    0 |",
            f"| N/A    0C    P0              0W /  N/A  | {memory:>22} |      0%      Default |",
            "|                                         |                        |                  N/A |",
            _COLUMNS,
        ]
    return [*lines, "", *_PROCESSES]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
