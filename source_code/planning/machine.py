# SPDX-License-Identifier: Apache-2.0
"""The machine that a forecast is made for: GPUs in nodes, and the links between them.

Rates and bandwidths are those that programs reach, not those of data sheets. A machine is a JSON
file that names its sources; the files in the folder machines/ are found by name. The defaults here
are those of machines/dgx-a100-80gb.json. Sizes are in bytes, times in seconds, rates per second.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from files.inputs import MEBIBYTE, InputError, is_number, read_json
from planning.time_coefficients import TimeCoefficients, coefficients_from

MACHINES = Path(__file__).parent / "machines"
SHORT = {  # a GPU's name: the machine with these GPUs
    "h100": "dgx-h100",
    "a100": "dgx-a100-80gb",
    "a100-80gb": "dgx-a100-80gb",
    "a100-40gb": "dgx-a100-40gb",
    "gb200": "gb200-nvl72",
}


@dataclass(frozen=True)
class Link:
    """`bandwidth` of one card or GPU in one direction; `number` is the number of cards per node."""

    bandwidth: float
    latency: float = 14e-6
    number: int = 8


@dataclass(frozen=True)
class Machine:
    """`gpus` GPUs in nodes of `gpus_per_node`.

    `flops` is the rate of one GPU within the matrix products of a training run. It is higher than
    the end-to-end rate of a training run, because bubble, messages and all other operations are
    counted separately. `fp8_flops` is the same for layers that compute in FP8, and 0 if the GPU has
    none. `attention_flops` is the rate of fused attention, which is slower than a product, and
    `flash_2_flops` that of FlashAttention 2, which does not use all instructions of newer GPUs
    (Shah et al. 2024, arXiv 2407.08608); 0 means the same rate. `hidden` is the fraction of the
    traffic of sharded weights, and of an overlapped tensor group, that can overlap with
    computation. `peak` is the rate of the data sheet, which only MFU needs. `memory_speed` is the
    rate of operations that only read and write. `measured`, if given, replaces `flops` and
    `memory_speed`, and `error` is then the relative error of its forecasts; other machines have
    that of expected_error.py. `bytes_per_value` is that of an activation or a weight. A node is
    what one fast network connects. It may consist of several computers with `gpus_per_host` GPUs
    each, which only the command that starts a plan needs to know; 0 means that it is one computer.
    """

    gpus: int
    flops: float = 213e12
    memory: float = 80e9
    gpus_per_node: int = 8
    inside: Link = Link(235e9, 3.4e-6)
    between: Link = Link(22e9, 14e-6, 8)
    memory_speed: float = 1.8e12
    peak: float = 312e12
    error: float = 0.0
    fp8_flops: float = 0.0
    attention_flops: float = 122e12
    flash_2_flops: float = 0.0
    hidden: float = 0.7
    measured: TimeCoefficients | None = None
    bytes_per_value: int = 2
    gpus_per_host: int = 0

    @property
    def card_share(self):
        """Bytes per second from each GPU to other nodes while all GPUs of its node send."""
        return self.between.bandwidth * self.between.number / self.gpus_per_node


FIELDS = {
    "gpus_per_node": 1,
    "memory_gigabytes": 1e9,
    "teraflops": 1e12,
    "peak_teraflops": 1e12,
    "memory_gigabytes_per_second": 1e9,
}
FURTHER = {
    "fp8_teraflops": ("fp8_flops", 1e12),
    "attention_teraflops": ("attention_flops", 1e12),
    "flash_2_teraflops": ("flash_2_flops", 1e12),
    "hidden": ("hidden", 1),
    "gpus_per_host": ("gpus_per_host", 1),
}  # a file without them, such as one of --this-machine, has the defaults
LINK_FIELDS = {"gigabytes_per_second": 1e9, "microseconds": 1e-6}


def machine_names():
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def read_machine(name, gpus):
    """The Machine of a JSON file, or of a file in machines/ by its name or that of its GPU.

    Raises InputError.
    """
    known = machine_names()
    full = SHORT.get(name.lower(), name)
    path = MACHINES / f"{full}.json" if full in known else Path(name)
    if full not in known and not os.path.exists(path):
        words = ", ".join([*SHORT, *known])
        raise InputError(f"{name} is neither a file nor one of {words}; give one of them")
    try:
        return machine_from(read_json(path, MEBIBYTE), gpus, name)
    except InputError as error:
        fix = "mend the file, or measure a machine with --this-machine --save"
        raise InputError(f"{error}; {fix}") from None


def machine_from(text, gpus, name):
    """The Machine of a parsed JSON file. Raises InputError."""
    if not isinstance(text, dict):
        raise InputError(f"{name} is not a JSON object")
    values = {key: _number(text, key, unit, name) for key, unit in FIELDS.items()}
    further = {
        field: _number(text, key, unit, name)
        for key, (field, unit) in FURTHER.items()
        if key in text
    }
    for key, count in {**values, **further}.items():
        if key.startswith("gpus_per") and count % 1:
            raise InputError(f"'{key}' of {name} is not a whole number")
    if further.get("hidden", 0) > 1:
        raise InputError(f"'hidden' of {name} is not a fraction of at most 1")
    if values["peak_teraflops"] < values["teraflops"]:  # one of them in another unit
        raise InputError(f"{name} has a 'peak_teraflops' below its 'teraflops'")
    measured = coefficients_from(text["measured"], name) if "measured" in text else None
    return Machine(
        gpus,
        flops=values["teraflops"],
        memory=values["memory_gigabytes"],
        gpus_per_node=int(values["gpus_per_node"]),
        inside=_link(text, "inside", name),
        between=_link(text, "between", name),
        memory_speed=values["memory_gigabytes_per_second"],
        peak=values["peak_teraflops"],
        error=_number(text, "error", 1, name) if measured else 0.0,
        measured=measured,
        bytes_per_value=_bytes_per_value(text, name),
        **further,
    )


def _bytes_per_value(text, name):
    value = text.get("bytes_per_value", 2)
    if value not in (2, 4, 8):
        raise InputError(f"'bytes_per_value' of {name} is not 2, 4 or 8")
    return value


def _link(text, key, name):
    link = text.get(key)
    if not isinstance(link, dict):
        raise InputError(f"{name} has no '{key}', an object with gigabytes_per_second")
    where = f"'{key}' of {name}"
    speed, latency = (_number(link, field, unit, where) for field, unit in LINK_FIELDS.items())
    cards = link.get("cards", 8)
    if not is_number(cards, 1, 1000) or cards % 1:
        raise InputError(f"'cards' in {where} is not a whole number from 1")
    return Link(speed, latency, int(cards))


def _number(text, key, unit, name):
    value = text.get(key)
    if not is_number(value, 1e-9, 1e9):
        raise InputError(f"{name} has no '{key}' above 0")
    return value * unit if unit >= 1 else value / round(1 / unit)
