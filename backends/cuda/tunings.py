"""Block shapes, warps and stages of the kernels: a table file, measured entries before estimates.

`tunings.yaml` has for each kernel a list of entries, of which the first that fits is taken:

    - {gpu: h200, n: 8192, k: 2816, rows: 1, use: {block_n: 8, ...}, us: 12.3}     measured
    - {k_max: 2048, use: {block_n: 8, ...}}                                        an estimate

Keys beside `gpu`, `use` and `us` are conditions on the shape: `n: 8192` is equality, `n_min` and
`n_max` are bounds. The shape of a quantised weight names their form, as in `int4: 32`: how many
share a scale. An entry with `us`, the microseconds that it took, was measured on its GPU, at the
whole shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from g4ir.errors import LowerError, SpecError

TABLE = Path(__file__).with_suffix(".yaml")
_OWN = {"gpu", "use", "us"}
_HEADER = """\
# Launch settings of the kernels, first match first; see tunings.py for the format. Entries with
# `us` were measured by `g4ir tune`; the others are estimates from the size of the machine.
"""


@dataclass(frozen=True)
class Tuning:
    """Settings of a kernel; `measured` where they were timed on this GPU at this very shape."""

    use: Mapping[str, int]
    measured: bool


def find_tuning(
    kernel: str, gpu: str, shape: Mapping[str, int], otherwise: Mapping[str, int] | None = None
) -> Tuning:
    """Return the first entry that fits, or else these settings; LowerError if there is neither."""
    for entry in read_tunings().get(kernel, ()):
        if _fits(entry, gpu, shape):
            return Tuning(entry["use"], "us" in entry)
    if otherwise is not None:
        return Tuning(otherwise, False)
    raise LowerError(
        f"{TABLE.name}: kernel {kernel} has no entry for {gpu} and {dict(shape)}; restore the "
        f"file, or add one"
    )


def _fits(entry: Mapping[str, Any], gpu: str, shape: Mapping[str, int]) -> bool:
    whole = "us" not in entry or shape.keys() <= entry.keys()  # codes are not what was measured
    return (
        whole
        and entry.get("gpu", gpu) == gpu
        and all(_holds(key, value, shape) for key, value in entry.items() if key not in _OWN)
    )


def _holds(key: str, value: int, shape: Mapping[str, int]) -> bool:
    name, _, bound = key.rpartition("_")
    if bound in ("min", "max"):
        return name in shape and (shape[name] >= value if bound == "min" else shape[name] <= value)
    return shape.get(key) == value


@cache
def read_tunings() -> Mapping[str, tuple[Mapping[str, Any], ...]]:
    """Return the entries by kernel of the table; SpecError if the file is not one."""
    import yaml

    try:
        body = yaml.safe_load(TABLE.read_text())
        table = {str(k): tuple(map(dict, v)) for k, v in body.items()}
    except (OSError, yaml.YAMLError, TypeError, ValueError, AttributeError) as e:
        raise SpecError(f"{TABLE}: not a table of tunings ({e}); restore the file") from e
    for kernel, entries in table.items():
        for entry in entries:
            _check(kernel, entry)
    return table


def _check(kernel: str, entry: Mapping[str, Any]) -> None:
    use = entry.get("use")
    rest = [v for k, v in entry.items() if k not in _OWN]
    whole = isinstance(use, dict) and _are_whole(use.values(), 1) and _are_whole(rest, 0)
    named = isinstance(entry.get("gpu", ""), str) and ("gpu" in entry or "us" not in entry)
    if not (whole and named):
        raise SpecError(
            f"{TABLE}: {kernel}: {entry}: expected whole numbers, `use` with settings above 0, and "
            f"a gpu beside us; correct the entry"
        )


def _are_whole(values: Iterable[Any], least: int) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) and v >= least for v in values)


def add_measured(
    kernel: str, gpu: str, shape: Mapping[str, int], use: Mapping[str, int], us: float
) -> None:
    """Put a measured entry first, in the place of an older one for the same shape."""
    import yaml

    from g4ir.ui.files import write_file

    table = {k: list(v) for k, v in read_tunings().items()}
    key = {"gpu": gpu, **shape}
    kept = [e for e in table.get(kernel, []) if {k: e.get(k) for k in key} != key or "us" not in e]
    entry = {**key, "use": dict(use), "us": round(us, 2)}
    _check(kernel, entry)
    table[kernel] = [entry, *kept]
    lines = [_HEADER]
    for name, entries in table.items():
        lines.append(f"{name}:\n")
        for e in entries:
            text = yaml.safe_dump(dict(e), default_flow_style=True, sort_keys=False, width=1000)
            lines.append(f"  - {text}")
    write_file(TABLE, ["".join(lines).encode()])
    read_tunings.cache_clear()
