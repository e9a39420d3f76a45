"""Random weights: each value is a pure function of seed, flat index, and the tensor's name and
shape (of norms, the spec too; a draft model's token order is the argsort of such values).

Any row of any matrix can thus be computed alone, on any device, bit-identically. The hash uses
int32 operations that wrap (add, multiply, xor, shift), which are exact everywhere. Its top 24
bits, an integer in [-2^23, 2^23), are exact in float32; then follow a multiply by spread / 2^23,
an add of the centre if it is not zero, and a cast, each correctly rounded on every device.

Flat index = block * 2^18 + offset, block < 2^30. Each block has two 32-bit keys, hashed from its
index and four words of the SHA-256 of seed and name; the offset goes through two multiply-xorshift
rounds with them (constants: https://github.com/skeeto/hash-prospector, lowbias32).
"""

from __future__ import annotations

import hashlib
import re
from functools import partial
from math import prod, sqrt
from pathlib import Path

import torch

from g4ir.errors import InputError
from g4ir.model.media import KINDS
from g4ir.model.names import NORM, ORDER
from g4ir.model.tensors import media_tensors, text_tensors
from g4ir.spec.record import Spec
from g4ir.weights.checkpoint import Checkpoint
from g4ir.weights.formats.base import StoredWeight
from g4ir.weights.tensorfile import TABLES

Shape = tuple[int, ...]
BLOCK_BITS = 18  # 2^18 int32 values are 1 MiB: the few buffers of a block stay in cache
BLOCK = 1 << BLOCK_BITS
LIMIT = 1 << 48  # largest number of elements of a tensor
M1, M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)


def _units(shape: Shape) -> dict[str, float]:
    """Return the named units of the tables of distributions: `fan_in`, for example, is the
    half-width of a uniform distribution with standard deviation 1 / sqrt(last dim)."""
    last, kernel = (max(prod(dims), 1) for dims in (shape[-1:], shape[1:]))
    return {
        "one": 1.0,
        "root": last**-0.5,
        "fan_in": sqrt(3.0 / last),
        "kernel": sqrt(3.0 / kernel),
    }


def distribution(name: str, shape: Shape) -> tuple[float, float]:
    """Return centre and half-width of the values of this tensor."""
    rows = (row for row in TABLES["distributions"] if re.search(row[0], name))
    _, centre, spread, unit = next(rows)
    size = _units(shape)[unit]
    return centre * size, spread * size


def norm_shift(spec: Spec, name: str, shape: Shape) -> float:
    """Return the shift of a decoder norm's centre from `distribution`: norms may be stored as w
    (around zero), and a score divisor is compensated by the query norms. 0 for other tensors."""
    text, match = spec.text, NORM.fullmatch(name)
    if not match:
        return 0.0
    divisor = (text.query_pre_attn_scalar or 1) ** 0.5 if match["query"] else 1.0
    return distribution(name, shape)[0] * (divisor - 1) - text.norms_about_zero


def random_tensor(
    seed: int,
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    shift: float = 0.0,
) -> torch.Tensor:
    """Compute the full tensor [*shape], block by block in one pass over the memory; `shift` moves
    the centre of its distribution."""
    centre, scale = _scale(name, shape, shift)
    count = prod(shape)
    out = torch.empty(count, dtype=dtype, device=device)
    offsets = torch.arange(min(count, BLOCK), dtype=torch.int32, device=device)
    bits, scratch = torch.empty_like(offsets), torch.empty_like(offsets)
    floats = torch.empty(offsets.shape, dtype=torch.float32, device=device)
    blocks = torch.arange(-(-count // BLOCK), dtype=torch.int32)
    keys = zip(*(key.tolist() for key in _block_keys(seed, name, blocks)))
    for piece, (first, second) in zip(out.split(BLOCK), keys):
        n = piece.numel()
        x = torch.bitwise_xor(offsets[:n], first, out=bits[:n])
        _mix(x, second, scratch[:n])
        piece.copy_(_scale_values(floats[:n].copy_(x), centre, scale))
    return out.view(shape)


def random_rows(
    seed: int,
    name: str,
    shape: Shape,
    row_ids: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Compute rows `row_ids` (any shape) of the 2-D tensor: [*row_ids.shape, columns],
    bit-identical to `random_tensor` without a shift."""
    centre, scale = _scale(name, shape, 0.0)
    columns = shape[1]
    ids = row_ids.reshape(-1).to(device=device, dtype=torch.int64)
    out = torch.empty((ids.numel(), columns), dtype=dtype, device=device)
    step = max(1, 4 * BLOCK // max(columns, 1))
    for part, rows in zip(out.split(step), ids.split(step)):
        x = _row_bits(seed, name, rows, columns)
        part.copy_(_scale_values(x.float(), centre, scale))
    return out.view(*row_ids.shape, columns)


def _row_bits(seed: int, name: str, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Return int32 [rows, columns]: the top 24 bits of the hash at each element of these rows."""
    start = rows[:, None] * columns
    block = start >> BLOCK_BITS
    spans = (columns - 1) // BLOCK + 2  # a row touches at most this many blocks
    near = torch.arange(spans, device=rows.device)
    keys = _block_keys(seed, name, (block + near).to(torch.int32))
    offset = (start & (BLOCK - 1)).to(torch.int32) + torch.arange(
        columns, dtype=torch.int32, device=rows.device
    )
    which = (offset >> BLOCK_BITS).long()
    x = (offset & (BLOCK - 1)).bitwise_xor_(keys[0].gather(1, which))
    return _mix(x, keys[1].gather(1, which), torch.empty_like(x))


def _scale(name: str, shape: Shape, shift: float) -> tuple[float, float]:
    """Return the centre, and the factor of the 24-bit integer; both are float32 values."""
    if prod(shape) > LIMIT:
        raise InputError(f"random tensor {name}: {prod(shape)} elements, expected at most {LIMIT}")
    centre, spread = distribution(name, shape)
    centre, spread = torch.tensor((centre + shift, spread), dtype=torch.float32).tolist()
    return centre, spread / 2**23


def _scale_values(values: torch.Tensor, centre: float, scale: float) -> torch.Tensor:
    values.mul_(scale)
    return values.add_(centre) if centre else values


def _mix(x: torch.Tensor, second: torch.Tensor | int, scratch: torch.Tensor) -> torch.Tensor:
    _xorshift(x, 16, scratch).mul_(M1).add_(second)
    return _xorshift(x, 15, scratch).mul_(M2).bitwise_right_shift_(8)


def _xorshift(x: torch.Tensor, bits: int, scratch: torch.Tensor) -> torch.Tensor:
    """Compute x ^= x >> bits in place, as unsigned: a mask clears the copies of the sign bit that
    torch's shift of int32 inserts."""
    torch.bitwise_right_shift(x, bits, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


def _block_keys(seed: int, name: str, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two int32 keys per block (int32, any shape), from SHA-256 of seed and name."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    words = [int.from_bytes(digest[i : i + 4], "little", signed=True) for i in range(0, 16, 4)]
    one = _finish(_finish(block ^ words[0]).add_(words[1]))
    two = _finish(_finish(block ^ words[2]).add_(words[3]))
    return one, two


def _finish(x: torch.Tensor) -> torch.Tensor:
    scratch = torch.empty_like(x)
    _xorshift(x, 16, scratch).mul_(M1)
    _xorshift(x, 15, scratch).mul_(M2)
    return _xorshift(x, 16, scratch)


def random_weights(
    spec: Spec,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    drafter: Spec | None = None,
) -> Checkpoint:
    """Return a checkpoint with random values for every tensor of a spec, and of its draft model's
    spec `drafter` if there is one. Values are computed on each read, not stored."""
    weights = {
        name: StoredWeight(shape, {"": partial(_values, spec, seed, name, shape, dtype, device)})
        for name, shape in (text_tensors(spec) | media_tensors(spec, KINDS)).items()
    }
    base = Checkpoint(Path(f"random weights of {spec.name}"), weights, dtype)
    return base.with_drafter(random_weights(drafter, seed, dtype, device)) if drafter else base


def _values(
    spec: Spec,
    seed: int,
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device | str,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    if rows is not None:
        return random_rows(seed, name, shape, rows, dtype, device)
    shift = norm_shift(spec, name, shape)
    if name == ORDER:
        return random_tensor(seed, name, shape, torch.float32, device, shift).argsort(stable=True)
    return random_tensor(seed, name, shape, dtype, device, shift)
