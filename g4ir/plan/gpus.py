"""GPUs by name, from public data sheets (gpus.yaml), and sizes in bytes.

`memory_bytes` is the card's total as the driver reports it, or, if its `source` says "as sold", the
size it is sold with (GB of 10^9 bytes). The rates are peaks: bf16 with fp32 accumulation, without
sparsity, from the source or by clock (gpus.yaml). `g4ir bench` measures what a card reaches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from textwrap import fill

from g4ir.errors import InputError
from g4ir.spec.reader import did_you_mean
from g4ir.ui.files import read_table

from .cost import Roof

TERA = 10**12


@dataclass(frozen=True)
class Gpu:
    """A device: bytes of memory; for a known card, peak rates per second (None: not published); for
    a known card of NVIDIA, the compute capability."""

    name: str
    memory_bytes: int
    bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    capability: tuple[int, int] | None = None
    source: str = "given"

    @property
    def roof(self) -> Roof:
        if self.bytes_per_s is None:
            raise InputError(f"GPU {self.name}: a memory size has no bandwidth; name a card")
        if self.bf16_flops_per_s is None:
            raise InputError(f"GPU {self.name}: its FLOP/s are not published; name another card")
        return Roof(self.bytes_per_s, self.bf16_flops_per_s, self.name)

    @property
    def step_roof(self) -> Roof | None:
        """The roofline of a decode step, bounded by bandwidth alone if the FLOP/s are not
        published; None if the bandwidth is not known."""
        if self.bytes_per_s is None:
            return None
        return Roof(self.bytes_per_s, self.bf16_flops_per_s or UNBOUNDED, self.name)

    @property
    def supported(self) -> bool:
        """Whether g4ir has kernels for it; True for a memory size without a card."""
        return self.capability is not None or self.source == "given"


#: FLOP/s of a roofline without a compute bound
UNBOUNDED = 1e18
#: decimal and binary units; the letters may be in any case, the B may be left out
UNITS = {"": 1} | {
    f"{letter}{i}b": (1024 if i else 1000) ** power
    for power, letter in enumerate("kmgt", 1)
    for i in ("", "i")
}
#: the rule of `parse_bytes`, for help and reports
SIZE_RULE = "GB is 10^9 bytes, GiB 2^30; a card sold as 16 GB has about 16 GiB"
#: upper bound of a size, above the memory of any machine
MAX_BYTES = 10**18

_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{0,40})?(?:e\+?[0-9]{1,3})?)\s*([kmgt]i?)?b?")


def parse_bytes(text: str, option: str) -> int:
    """`24GiB`, `80GB`, `80e9`, `1.5 TB`, `85899345920` -> bytes; GB is 10^9, GiB 2^30.

    Raises InputError that names `option` for a text that is no size, and for sizes that are not
    above 0, too large, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if not match:
        raise InputError(
            f"{option} {text[:40]!r}: expected bytes above 0, such as 24GiB, 80GB or 80e9"
        )
    value = Decimal(match[1]) * UNITS[f"{match[2]}b" if match[2] else ""]
    if not 0 < value <= MAX_BYTES:
        raise InputError(f"{option} {text[:40]!r}: expected between 1 byte and 1e18")
    if value != int(value):
        raise InputError(f"{option} {text[:40]!r}: that is no whole number of bytes")
    return int(value)


def _read_gpus() -> dict[str, Gpu]:
    rows = read_table(Path(__file__).with_suffix(".yaml")).items()
    return {
        name: Gpu(
            *(name, parse_bytes(memory, name), rate * TERA, flops and flops * TERA),
            *(capability and (*capability,), source),
        )
        for name, (memory, rate, flops, capability, source) in rows
    }


GPUS = _read_gpus()


def gpu_names() -> str:
    """Return the names of the known cards and the units of a size as lines of help."""
    return f"{fill(', '.join(GPUS), 76)}\n({SIZE_RULE})"


def find_gpu(text: str) -> Gpu:
    """Return a card by name (`h100-80gb`; `H100` and `rtx 4090` if only one matches), or a device
    of a memory size (`24GiB`, `80GB`, `80e9`), whose rates are unknown.

    Raises InputError for an unknown card (with the nearest name), for a name that fits several, and
    for a wrong size.
    """
    matches = _matches(text)
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = " or ".join(g.name for g in matches)
        raise InputError(f"GPU {text[:40]!r} is ambiguous: {names}")
    if not re.match(r"\s*[0-9.+-]", text):
        expected = "expected a size such as 24GiB, or a card of `g4ir plan --help`"
        raise InputError(f"unknown GPU {text[:40]!r}: {expected}{did_you_mean(text, GPUS)}")
    return Gpu(text.strip(), parse_bytes(text, "GPU"))


def _matches(text: str) -> list[Gpu]:
    """Return the card with this name, else all cards whose name without the memory size, and
    perhaps without `rtx`, is this."""
    want = re.sub(r"[\s_-]", "", text.lower())
    plain = {name.replace("-", ""): g for name, g in GPUS.items()}
    if want in plain:
        return [plain[want]]
    short = {name: name.rpartition("-")[0].replace("-", "") for name in GPUS}
    return [GPUS[name] for name, s in short.items() if want in (s, s.removeprefix("rtx"))]
