"""GPUs by name: memory, bandwidth and matmul rate from public data sheets, and sizes in bytes.

`memory_bytes` is what the driver reports as the card's total (the MiB that nvidia-smi prints),
which is what a program can plan with; where that figure is not known for sure it is the size the
card is sold with, in GB, and `source` says "as sold". The rates are the vendor's peaks: bf16
(float16 on a card without bf16) with fp32 accumulation, without sparsity. `g4ir bench` measures
what a card reaches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from textwrap import fill

from g4ir.errors import InputError

from .cost import Roof

GB, MIB = 10**9, 2**20
TERA = 10**12


@dataclass(frozen=True)
class Gpu:
    """A device: its memory in bytes and, where it is a known card, its peak rates per second."""

    name: str
    memory_bytes: int
    bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    source: str = "given"

    @property
    def roof(self) -> Roof:
        if self.bytes_per_s is None or self.bf16_flops_per_s is None:
            raise InputError(
                f"GPU {self.name}: a size says nothing of speed: name a card or give its rates"
            )
        return Roof(self.bytes_per_s, self.bf16_flops_per_s, self.name)


#: name, bytes, TB/s, TFLOP/s, source
_CARDS = (
    ("h100-80gb", 81559 * MIB, 3.35, 989.4, "H100 data sheet (SXM5), driver"),
    ("h100-pcie-80gb", 81559 * MIB, 2.0, 756.5, "H100 data sheet (PCIe), driver"),
    ("h100-nvl-94gb", 94 * GB, 3.9, 835.5, "H100 data sheet (NVL), as sold"),
    ("h200-141gb", 143771 * MIB, 4.8, 989.4, "H200 data sheet (SXM5), driver"),
    ("b200-180gb", 183359 * MIB, 8.0, 2250.0, "HGX B200 data sheet, driver"),
    ("a100-40gb", 40960 * MIB, 1.555, 312.0, "A100 data sheet (SXM4), driver"),
    ("a100-80gb", 81920 * MIB, 2.039, 312.0, "A100 data sheet (SXM4), driver"),
    ("a6000-48gb", 49140 * MIB, 0.768, 154.8, "RTX A6000 data sheet (Ampere), driver"),
    ("l40s-48gb", 46068 * MIB, 0.864, 362.05, "L40S data sheet, driver"),
    ("rtx5090-32gb", 32607 * MIB, 1.792, 209.5, "RTX Blackwell white paper, driver"),
    ("rtx4090-24gb", 24564 * MIB, 1.008, 165.2, "Ada white paper, driver"),
    ("l4-24gb", 23034 * MIB, 0.3, 121.0, "L4 data sheet, driver"),
    ("rtx5080-16gb", 16303 * MIB, 0.96, 112.6, "RTX Blackwell white paper, driver"),
    ("rtx4080-16gb", 16376 * MIB, 0.7168, 97.5, "Ada white paper, driver"),
    ("t4-16gb", 15360 * MIB, 0.32, 65.0, "T4 data sheet (float16; no bf16 units), driver"),
    ("rtx4070ti-12gb", 12282 * MIB, 0.5042, 80.2, "Ada white paper, driver"),
    ("rtx4070-12gb", 12282 * MIB, 0.5042, 58.3, "Ada white paper, driver"),
    ("rtx4060-8gb", 8188 * MIB, 0.272, 30.2, "Ada white paper, driver"),
)
GPUS = {
    name: Gpu(name, memory, rate * TERA, flops * TERA, source)
    for name, memory, rate, flops, source in _CARDS
}

#: decimal and binary units; the letters may be in any case, the B may be left out
UNITS = {"": 1} | {
    f"{letter}{i}b": (1024 if i else 1000) ** power
    for power, letter in enumerate("kmgt", 1)
    for i in ("", "i")
}
#: the rule of `parse_bytes`, for help and reports
SIZE_RULE = "GB is 10^9 bytes, GiB 2^30; a card sold as 16 GB has about 16 GiB"
#: more than any machine has
MOST_BYTES = 10**18

_SIZE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{0,40})?(?:e\+?[0-9]{1,3})?)\s*([kmgt]i?)?b?")


def gpu_names() -> str:
    """Return the names of the known cards and the units of a size as lines of help."""
    return f"{fill(', '.join(GPUS), 76)}\n({SIZE_RULE})"


def find_gpu(text: str) -> Gpu:
    """Return a card by name (`h100-80gb`; `H100` and `rtx 4090` where that names one), or a device
    of so many bytes (`24GiB`, `80GB`, `80e9`), of which only the memory is known.

    Raises InputError that lists the cards.
    """
    found = _matches(text)
    if len(found) == 1:
        return found[0]
    if found:
        names = " or ".join(g.name for g in found)
        raise InputError(f"GPU {text[:40]!r} may be {names}: say which")
    if not re.match(r"\s*[0-9.+-]", text):
        raise InputError(
            f"unknown GPU {text[:40]!r}: one of {', '.join(GPUS)}, or a size such as 24GiB"
        )
    return Gpu(text.strip(), parse_bytes(text, "GPU"))


def _matches(text: str) -> list[Gpu]:
    """Return cards whose name this is, or else begins with: all of it up to a dash."""
    want = re.sub(r"[\s_-]", "", text.lower())
    plain = {name.replace("-", ""): g for name, g in GPUS.items()}
    if want in plain:
        return [plain[want]]
    short = {name: name.rpartition("-")[0].replace("-", "") for name in GPUS}
    return [GPUS[name] for name, s in short.items() if want in (s, s.removeprefix("rtx"))]


def parse_bytes(text: str, what: str) -> int:
    """`24GiB`, `80GB`, `80e9`, `1.5 TB`, `85899345920` -> bytes; GB is 10^9, GiB 2^30.

    Raises InputError that names `what`: no size, not positive, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if not match:
        raise InputError(
            f"{what} {text[:40]!r}: expected bytes above 0, such as 24GiB, 80GB or 80e9"
        )
    value = Decimal(match[1]) * UNITS[f"{match[2]}b" if match[2] else ""]
    if not 0 < value <= MOST_BYTES:
        raise InputError(f"{what} {text[:40]!r}: expected between 1 byte and 1e18")
    if value != int(value):
        raise InputError(f"{what} {text[:40]!r}: that is no whole number of bytes")
    return int(value)
