"""Sums over ranks with the residual and the norms after them: one-shot all-reduce.

Each rank has a buffer that all others can read and write. A program computes a row: it copies its
rank's part there, raises a flag at every rank, waits for the flags of all, reads the other parts
and adds them in order of rank in fp32, so that all ranks have the same bits. The rest is the norm
of norms_triton.py.

A buffer is: [32] epochs, which count a row's messages and which its own rank alone touches;
[32, ranks] flags, each the epoch that a rank has reached; and two halves of [32] slots, taken in
turn: a rank that writes a half again has seen all others begin the message between, for which they
had to end the one in which they read it. A flag is raised with release and waited for with acquire,
by one thread, with a barrier on the other side. Epochs may wrap around: only their difference
counts, so that a recorded step is replayed as it is.

If a rank does not come, the row becomes NaN after so many looks: a kernel that waits for ever would
take the process, which has to name the rank, with it. No GPU has run this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton
import triton.language as tl
from torch.library import triton_op

from g4ir.ops.reduce_norm import MOST_ROWS

from .base import SLOT
from .launch import begin, power_of_2, ready, rounded, start, takes
from .norms_triton import added, end, factor, reference, three, weight

Tensor = torch.Tensor
ROWS, SLOT_BYTES = tl.constexpr(MOST_ROWS), tl.constexpr(SLOT)
#: how often a flag is looked at: minutes
LOOKS = tl.constexpr(1 << 28)

_MEETING: ContextVar[Tensor | None] = ContextVar("meeting", default=None)


def buffer_bytes(ranks: int) -> int:
    """Return the bytes of a rank's buffer, all of which begin as zeros."""
    return 4 * MOST_ROWS * (1 + ranks) + 2 * MOST_ROWS * SLOT


@contextmanager
def meeting_at(peers: Tensor) -> Iterator[None]:
    """A context in which ranks meet at `peers`, i64[1 + ranks]: which rank this is, and the
    addresses of all buffers, in order of rank."""
    token = _MEETING.set(peers)
    try:
        yield
    finally:
        _MEETING.reset(token)


#: the buffers of ranks that are alone, and live as long as the process
_alone: dict[torch.device, tuple[Tensor, Tensor]] = {}


def meeting(device: torch.device) -> Tensor:
    """Return where ranks meet; outside of `meeting_at` a rank is alone."""
    if (peers := _MEETING.get()) is not None:
        return peers
    if device not in _alone:
        own = torch.zeros(buffer_bytes(1), dtype=torch.uint8, device=device)
        _alone[device] = own, torch.tensor([0, own.data_ptr()], device=device)
    return _alone[device][1]


@triton.jit
def _words(peers, of):
    """The epochs of a rank's buffer, with which it begins."""
    return tl.load(peers + 1 + of).to(tl.pointer_type(tl.int32))


@triton.jit
def _slot(peers, of, row, epoch, like, RANKS):
    """Where a rank's part of a row begins, for this message."""
    half = (epoch & 1).to(tl.int64)
    at = 4 * ROWS * (1 + RANKS) + (half * ROWS + row) * SLOT_BYTES
    return (tl.load(peers + 1 + of) + at).to(tl.pointer_type(like.dtype.element_ty))


@triton.jit
def _raise_flags(peers, me, row, epoch, RANKS: tl.constexpr):
    """Tell every rank that this one's part of the row is there."""
    tl.debug_barrier()
    for of in tl.static_range(RANKS):
        flag = _words(peers, of) + ROWS + row * RANKS + me
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def _wait(peers, me, row, epoch, RANKS: tl.constexpr):
    """Wait until the parts of all ranks are there; returns 1, or NaN where one did not come."""
    came = 1.0
    for of in tl.static_range(RANKS):
        flag = _words(peers, me) + ROWS + row * RANKS + of
        behind = epoch - tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks = 0
        while (behind > 0) & (looks < LOOKS):
            behind = epoch - tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            looks += 1
        came = tl.where(behind > 0, float("nan"), came)
    tl.debug_barrier()
    return came


@triton.jit
def _sum(peers, row, epoch, first, i, keep, like, RANKS: tl.constexpr):
    """fp32 sum of what ranks have of a row, from element `first` of the slots on, in order of rank;
    rounded through the type of `like`."""
    h = tl.load(
        _slot(peers, 0, row, epoch, like, RANKS) + first + i, mask=keep, other=0, volatile=True
    )
    h = h.to(tl.float32)
    for of in tl.static_range(1, RANKS):
        part = _slot(peers, of, row, epoch, like, RANKS) + first + i
        h += tl.load(part, mask=keep, other=0, volatile=True).to(tl.float32)
    return rounded(h, like)


@triton.jit
def _all_reduce_norm_residual(
    x,
    w_x,
    b,
    w_b,
    residual,
    w,
    scalar,
    w1,
    w2,
    w3,
    y,
    y1,
    y2,
    y3,
    peers,
    eps,
    D: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr = False,
):
    """As _norm_residual; peers [1 + RANKS]. x and b follow one another in a slot. Grid: rows."""
    begin(AHEAD)
    row = tl.program_id(0)
    at = row.to(tl.int64) * D
    i = tl.arange(0, BLOCK)
    keep = i < D
    g1, g2, g3 = weight(w1, i, keep), weight(w2, i, keep), weight(w3, i, keep)
    by, g = factor(scalar), weight(w, i, keep)
    g_x, g_b = weight(w_x, i, keep), weight(w_b, i, keep)
    ready(AHEAD)
    me = tl.load(peers).to(tl.int32)
    epoch = tl.load(_words(peers, me) + row) + 1  # from 1 on, of the messages of this row
    mine = _slot(peers, me, row, epoch, residual, RANKS)
    tl.store(mine + i, tl.load(x + at + i, mask=keep, other=0), mask=keep)
    if b is not None:
        tl.store(mine + D + i, tl.load(b + at + i, mask=keep, other=0), mask=keep)
    _raise_flags(peers, me, row, epoch, RANKS)
    r = tl.load(residual + at + i, mask=keep, other=0)
    by *= _wait(peers, me, row, epoch, RANKS)
    h, h_b = _sum(peers, row, epoch, 0, i, keep, residual, RANKS), None
    if b is not None:
        h_b = _sum(peers, row, epoch, D, i, keep, residual, RANKS)
    tl.store(_words(peers, me) + row, epoch)
    h = added(h, h_b, r, g_x, g_b, g, y, eps, D)
    end(h, by, g1, g2, g3, y, y1, y2, y3, at, i, keep, eps, D)


@triton_op("g4ir::all_reduce_norm_residual", mutates_args={})
def all_reduce_norm_residual(
    x: Tensor,
    residual: Tensor,
    w_post: Tensor,
    scalar: Tensor | None,
    weights: list[Tensor | None],
    eps: float,
    peers: Tensor,
    ranks: int,
    warps: int,
    w_x: Tensor | None = None,
    b: Tensor | None = None,
    w_b: Tensor | None = None,
) -> list[Tensor]:
    """Return `norm_residual` of the sums of what ranks have of x and of b, in one collective

    x, b, residual and results [B, 1, D], at most 32 rows; peers as in `meeting_at`; the rest as in
    `norm_residual`. Off a GPU for a rank that is alone.
    """
    if not takes(residual):
        return reference(x, residual, w_post, scalar, weights, eps, w_x, b, w_b)
    d = residual.shape[-1]
    y, *norms = [torch.empty_like(x) for _ in range(1 + len(weights))]
    summed = (x.contiguous(), w_x, b if b is None else b.contiguous(), w_b)
    given = (*summed, residual.contiguous(), w_post, scalar, *three(weights))
    start(
        _all_reduce_norm_residual,
        (x.numel() // d,),
        (*given, y, *three(norms), peers, eps),
        D=d,
        RANKS=ranks,
        BLOCK=power_of_2(d),
        num_warps=warps,
    )
    return [y, *norms]
