"""The process group of a tensor-parallel model, started by torchrun, and its collectives.

    with join() as group:
        follow(group) if group.rank else lead()

Rank 0 leads: it broadcasts calls to the workers (`send`, `receive`), the last one empty.
Collectives of a step use torch's process group, NCCL on CUDA and gloo elsewhere.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from g4ir.errors import InputError, MissingError, RankError
from g4ir.ir.graph import Node
from g4ir.ir.interpret import run_node
from g4ir.ops.base import upcast
from g4ir.ops.types import dtype_name, torch, torch_dtype
from g4ir.ui.console import defer_signals

log = logging.getLogger(__name__)
#: default of `--set rank_timeout`
TIMEOUT_S = 300.0
#: timeout of a worker that waits for rank 0's next call, which may depend on a user, and of ranks
#: that wait until all have loaded or built an engine
FOREVER = timedelta(days=365)
#: bytes of a call's first broadcast, enough for a decode step; longer calls need a second one
FRAME = 1 << 15
#: all-reduces of up to this many bytes are all-gather + local sum in order of rank (deterministic)
GATHERED = 1 << 18
#: after a connection broke: number of polls for an ended process, and seconds between two of them
SETTLED, LOOK_S = 30, 0.01


@dataclass(frozen=True)
class RankLaunch:
    """RANK, WORLD_SIZE and LOCAL_RANK of this process."""

    rank: int
    ranks: int
    local: int


def launched() -> RankLaunch | None:
    """Return torchrun's variables of this process; None without torchrun, or with one process."""
    values = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(text.isdecimal() for text in values[:2]) or int(values[1]) < 2:
        return None
    return RankLaunch(int(values[0]), int(values[1]), int(values[2] or values[0]))


@dataclass(frozen=True)
class RankProcess:
    """Host and process of a rank."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    @property
    def ended(self) -> bool:
        """Whether it has ended; False for processes on other hosts, whose state is unknown."""
        if self.host != socket.gethostname():
            return False
        import psutil

        try:  # a zombie, which its parent has not reaped, has ended
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.Error as e:
            return isinstance(e, psutil.NoSuchProcess)


class Group:
    """The process group of all ranks. Every rank must run the same collectives in the same order,
    from one thread at a time (`together`)."""

    def __init__(self, launch: RankLaunch, timeout_s: float, on_gpus: bool) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self.rank, self.ranks, self.timeout_s = launch.rank, launch.ranks, timeout_s
        #: whether this rank has a GPU of its own and NCCL
        self.on_gpus = on_gpus
        #: whether a call failed or the group was left: no collective may follow
        self.broken = False
        #: the error of a failed collective or an ended rank
        self.lost: RankError | None = None
        #: counter for ids of objects that exist on every rank; ids of objects that rank 0 has
        #: dropped, which go out with the next call
        self.numbers, self.dropped = itertools.count(1), deque[int]()
        #: lock: one thread of rank 0 sends a call at a time
        self.turn = threading.RLock()
        self._calls = dist.new_group(backend="gloo", timeout=FOREVER)
        self._processes: tuple[RankProcess, ...] = ()
        processes = self.gather_values([socket.gethostname(), os.getpid()])
        self._processes = tuple(RankProcess(i, *who) for i, who in enumerate(processes))

    # --- sums of a step -----------------------------------------------------------------------

    def run_node(self, n: Node, tensors: list[Any]) -> tuple[Any, ...]:
        """Run a node on this rank, a collective across all; the argument `run` of `interpret`."""
        collectives = {"all_reduce": self.all_reduce, "all_gather": self.all_gather}
        return collectives[n.op](tensors) if n.op in collectives else run_node(n, tensors)

    def all_reduce(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Sum tensors of one dtype over ranks, in fp32 and in one collective; see the op
        `all_reduce`. In order of rank up to GATHERED bytes, else in torch's order."""
        flat = torch.cat([x.reshape(-1) for x in parts]) if len(parts) > 1 else parts[0].reshape(-1)
        if flat.nbytes <= GATHERED:
            total = rank_sum(self._all(flat))
        else:
            total = upcast(flat).clone()
            with self._watched():
                self._dist.all_reduce(total)
            total = total.to(flat.dtype)
        pieces = total.split([x.numel() for x in parts])
        return tuple(t.view(x.shape) for t, x in zip(pieces, parts, strict=True))

    def all_gather(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Concatenate the one tensor in `parts` over all ranks, in order, along the last dim."""
        (x,) = parts
        return (torch.cat(self._all(x), -1),)

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        out = list(x.new_empty((self.ranks, *x.shape)))
        with self._watched():
            self._dist.all_gather(out, x.contiguous())
        return out

    def share_with_leader(
        self, x: torch.Tensor, see: Callable[[int, torch.Tensor], None] | None
    ) -> None:
        """Gather each rank's tensor, all of one type; on rank 0 `see(rank, tensor)` may modify it
        in place (`see` is None on workers); then copy each rank's tensor back into its `x`."""
        parts = self._all(_bytes(x))
        if see:
            for rank, part in enumerate(parts):
                see(rank, part.view(x.dtype).view(x.shape))
        back = torch.stack(parts)
        with self._watched():
            self._dist.broadcast(back, 0)
        x.copy_(back[self.rank].view(x.dtype).view(x.shape))

    @cached_property
    def _nccl(self) -> Any:
        with self._watched():
            group = self._dist.new_group(backend="nccl")
            self._dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # connects
        torch.cuda.synchronize()
        return group

    def communicator(self) -> int:
        """Return the address of an `ncclComm_t` of all ranks, valid until the group is closed. A
        collective call. MissingError if this torch does not expose it."""
        backend = self._nccl._get_backend(torch.device("cuda"))
        address = getattr(backend, "_comm_ptr", None)
        if address is None:
            lacks = f"torch {torch.__version__} does not expose its NCCL communicator"
            raise MissingError(f"rank {self.rank}: {lacks}; install a newer one")
        return int(address())

    # --- calls --------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context of rank 0 for a call on all ranks: one at a time, signals deferred. After any
        error the group is broken."""
        with defer_signals(), self.turn:
            try:
                yield
            except BaseException:
                self.broken = True
                raise

    def send(self, call: Sequence[Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Broadcast a call (JSON values) and its tensors to the workers; the ids of dropped objects
        are appended to a call that is not empty."""
        wait = timedelta(seconds=self.timeout_s)
        if call:
            call = [*call, [self.dropped.popleft() for _ in range(len(self.dropped))]]
        on_cpu = {name: t.detach().cpu() for name, t in tensors.items()}
        types = {name: [dtype_name(t.dtype), [*t.shape]] for name, t in on_cpu.items()}
        words, data = _words([call, types]), [_bytes(t) for t in on_cpu.values()]
        sizes = torch.tensor([len(words), sum(map(len, data))])
        message = torch.cat([sizes.view(torch.uint8), words, *data])
        message = torch.nn.functional.pad(message, (0, max(0, FRAME - len(message))))
        self._broadcast(message[:FRAME], wait)
        if len(message) > FRAME:
            self._broadcast(message[FRAME:], wait)

    def receive(self) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """Wait for rank 0's next call; return its values, the ids of dropped objects last, and its
        tensors on the CPU. An empty call is the last."""
        message = self._broadcast(torch.zeros(FRAME, dtype=torch.uint8))
        text, data = message[:16].view(torch.int64).tolist()
        size = 16 + text + data
        if size > FRAME:
            remainder = self._broadcast(torch.empty(size - FRAME, dtype=torch.uint8))
            message = torch.cat((message, remainder))
        call, types = json.loads(message[16 : 16 + text].numpy().tobytes())
        tensors, at = {}, 16 + text
        for name, (kind, shape) in types.items():
            tensor = torch.empty(shape, dtype=torch_dtype(kind))
            tensor.reshape(-1).view(torch.uint8).copy_(message[at : at + tensor.nbytes])
            tensors[name], at = tensor, at + tensor.nbytes
        return call, tensors

    def _broadcast(self, x: torch.Tensor, wait: timedelta = FOREVER) -> torch.Tensor:
        with self._watched():
            work = self._dist.broadcast(x, 0, group=self._calls, async_op=True)
            assert work
            work.wait(wait)
        return x

    def gather_values(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in order of rank."""
        words = _words(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        with self._watched():
            self._dist.all_gather(sizes, torch.tensor([len(words)]), group=self._calls)
            max_size = max(map(int, sizes))
            texts = [words.new_empty(max_size) for _ in sizes]
            padded = torch.nn.functional.pad(words, (0, max_size - len(words)), value=ord(" "))
            self._dist.all_gather(texts, padded, group=self._calls)
        return [json.loads(t.numpy().tobytes()) for t in texts]

    # --- ends ---------------------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Context that converts the failure of a collective to a RankError with the lost ranks."""
        if self.broken:
            why = "an earlier call failed, or the group was left; start all ranks again"
            raise self.lost or RankError(f"rank {self.rank}: {why}")
        try:
            yield
        except RuntimeError as e:
            raise self._failed(self._why(str(e))) from e

    def _gone(self) -> str:
        gone = " and ".join(str(p) for p in self._processes if p.rank != self.rank and p.ended)
        return gone and f"{gone} ended; see its output, and start all ranks again"

    def check(self) -> None:
        """Raise RankError if a collective failed or another rank's process on this host ended."""
        if self.lost:
            raise self.lost
        if gone := self._gone():
            raise self._failed(gone)

    def _failed(self, why: str) -> RankError:
        self.broken = True
        self.lost = RankError(f"rank {self.rank}: {why}")
        return self.lost

    def _why(self, error: str) -> str:
        for _ in range(SETTLED):
            if gone := self._gone():
                return gone
            time.sleep(LOOK_S)
        siblings = " or ".join(str(p) for p in self._processes if p.rank != self.rank)
        siblings = siblings or "the others"
        if "imed out" in error or "imeout" in error:
            late = f"no answer within {self.timeout_s:g} s (--set rank_timeout)"
            return f"{late} from {siblings}; start all ranks again"
        first = error.splitlines()[0].removeprefix("[")[:200]
        return f"the connection to {siblings} broke: {first}; start all ranks again"

    def close(self) -> None:
        """Leave the group; rank 0 sends the last call. Nothing is done to a broken one: torch would
        wait for a running collective."""
        if not self.broken:
            if self.rank == 0:
                self.send([], {})
            self.broken = True
            self._dist.destroy_process_group()


def rank_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in order of rank, so that it is bit-identical on all ranks; 16-bit tensors are
    summed in fp32 and rounded once."""
    total, *remaining = map(upcast, parts)
    for part in remaining:
        total = total + part
    return total.to(parts[0].dtype)


#: the group that this process has joined, at most one
_joined: list[Group] = []


def current() -> Group | None:
    """Return the group that this process has joined; None if it has not."""
    return _joined[-1] if _joined else None


@contextmanager
def join(timeout_s: float = TIMEOUT_S) -> Iterator[Group]:
    """Join the process group that torchrun started, for the duration of a context; ranks wait at
    most `timeout_s` for each other, in the collectives of a step too (without a limit for the next
    call, and while another loads or builds an engine). InputError without torchrun or with one
    process, for a wrong timeout, or if joined already; MissingError if they cannot connect;
    RankError if one does not join."""
    launch = launched()
    if launch is None:
        raise InputError("this process is alone; start several: torchrun --nproc-per-node N ...")
    if not 0 < timeout_s <= FOREVER.total_seconds():
        limit = f"above 0, at most {FOREVER.total_seconds():.0f}"
        raise InputError(f"--set rank_timeout={timeout_s:g}: expected seconds {limit}")
    if _joined:
        raise InputError("this process has joined its group already")
    group = Group(launch, timeout_s, _connect(launch, timeout_s))
    _joined.append(group)
    try:
        yield group
    finally:
        _joined.remove(group)
        group.close()


def _connect(launch: RankLaunch, timeout_s: float) -> bool:
    """Create torch's default group: gloo, and NCCL if torch has it and this rank a GPU; return
    whether NCCL is in it."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise MissingError("this torch lacks gloo, which ranks need; install a torch that has it")
    on_gpus = launch.local < torch.cuda.device_count() and dist.is_nccl_available()
    if on_gpus:
        torch.cuda.set_device(launch.local)
    backend, wait = "cpu:gloo,cuda:nccl" if on_gpus else "gloo", timedelta(seconds=timeout_s)
    who = f"rank {launch.rank} of {launch.ranks}"
    try:
        store, rank, ranks = next(dist.rendezvous("env://", timeout=wait))
        named = dist.PrefixStore("g4ir", store)
        dist.init_process_group(backend, store=named, rank=rank, world_size=ranks, timeout=wait)
    except (dist.DistStoreError, dist.DistNetworkError) as e:
        why = f"not all ranks could join (timeout {timeout_s:g} s): {_first(e)}"
        raise RankError(f"{who}: {why}; start all ranks again") from e
    except ValueError as e:  # a missing variable, such as MASTER_ADDR
        raise InputError(f"{who}: {_first(e)}; correct it, or start the ranks with torchrun") from e
    except RuntimeError as e:
        why = f"{who}: the ranks cannot reach each other: {_first(e)}"
        fix = "GLOO_SOCKET_IFNAME=NAME (lo on one machine; NCCL_SOCKET_IFNAME for NCCL)"
        raise MissingError(f"{why}; name a network interface that they share: {fix}") from e
    return on_gpus


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's bytes, in row-major order. (`view` of the tensor itself needs a
    last stride of 1, which that of a single element need not have.)"""
    return x.new_empty(x.numel()).copy_(x.reshape(-1)).view(torch.uint8)


def _words(value: Any) -> torch.Tensor:
    """Return the JSON of a value as a tensor of bytes."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _first(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
