"""Tables in host memory that a GPU reads: which memory, and who lets go of it. CUDA is played by
an object that notes what it is asked."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from g4ir.backends.cuda import host_table
from g4ir.backends.cuda.host_table import HostTable, open_host_table
from g4ir.builder import load as loading
from g4ir.builder.load import load_engine
from g4ir.engine.engine import Engine
from g4ir.ir.graph import Value
from g4ir.weights.pack import StoredParams


class Cuda:
    """Registers what it `takes`."""

    def __init__(self, takes: tuple[int, ...]) -> None:
        self.takes, self.held = takes, dict[int, tuple[int, int]]()

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:
        if flags in self.takes:
            self.held[begin] = (size, flags)
            return 0
        return 801  # not supported

    def cudaHostUnregister(self, begin: int) -> int:
        del self.held[begin]
        return 0


@pytest.fixture
def engine(engines: Any) -> Engine:
    return engines("reference", "tiny-ple")


@pytest.fixture
def source(engine: Engine) -> Iterator[StoredParams]:
    params = StoredParams.open(sorted(engine.path.glob("*.safetensors")))
    yield params
    params.close()


def table_of(engine: Engine) -> Value:
    return next(v for v in engine.program.graphs["embed"].params if v.name == "ple.table")


FILE, COPY = 11, 3  # flags: a mapping is only read


def read_at(address: int, ids: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """What the kernel does, which tests/interpreted/test_gather.py looks at."""
    size = columns * dtype.itemsize
    rows = [ctypes.string_at(address + i * size, size) for i in ids.flatten().tolist()]
    made = torch.frombuffer(bytearray(b"".join(rows)), dtype=dtype)
    return made.view(*ids.shape, columns)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_table, "gather_host_rows", read_at)


@pytest.mark.parametrize(
    "placement, takes, flags",
    [("mmap", (FILE, COPY), FILE), ("mmap", (COPY,), COPY), ("host", (FILE, COPY), COPY)],
)
def test_what_is_registered(
    engine: Engine,
    source: StoredParams,
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    takes: tuple[int, ...],
    flags: int,
) -> None:
    """Whole pages around the table, for as long as it lives; a file that cannot be is copied."""
    cuda = Cuda(takes)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(host_table, "PIECE_BYTES", 5000)
    v = table_of(engine)
    table = open_host_table(source, v, placement, "cpu")
    assert isinstance(table, HostTable) and table.device.type == "cpu"
    plain = source.tensor(v.name)
    assert torch.equal(table.table, plain) and table.dtype == plain.dtype
    assert (table.table.data_ptr() == plain.data_ptr()) is (flags == FILE)
    ((begin, (size, found)),) = cuda.held.items()
    address = table.table.data_ptr()
    assert found == flags and begin % mmap.PAGESIZE == 0
    assert begin <= address and begin + size == address + plain.nbytes
    del table, plain
    gc.collect()
    assert not cuda.held


@pytest.mark.parametrize("placement", ["mmap", "host"])
def test_what_the_gpu_does_not_read_is_gathered_by_the_host(
    engine: Engine,
    source: StoredParams,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    placement: str,
) -> None:
    """As where there is no C compiler for what triton starts kernels with."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nand more")

    monkeypatch.setattr(host_table, "gather_host_rows", fails)
    cuda = Cuda((FILE, COPY))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    v = table_of(engine)
    with caplog.at_level(logging.WARNING):
        table = open_host_table(source, v, placement, "cpu")
    ids = torch.tensor([[3], [500]])
    assert torch.equal(table[ids], source.tensor(v.name)[ids])
    (said,) = caplog.messages
    caplog.clear()
    assert "Failed to find C compiler." in said and "and more" not in said
    monkeypatch.setattr(host_table, "gather_host_rows", lambda *given: read_at(*given) + 1)
    assert not isinstance(open_host_table(source, v, placement, "cpu"), HostTable)
    monkeypatch.setattr(host_table, "gather_host_rows", read_at)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cuda(()))  # which registers nothing
    assert torch.equal(
        open_host_table(source, v, placement, "cpu")[ids], source.tensor(v.name)[ids]
    )
    assert "the host" in caplog.text and v.name in caplog.text


def test_a_refusal_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would tell it to whoever starts the next kernel."""
    started: list[str] = []

    class Kernel:
        def add_(self, other: int) -> None:
            started.append("kernel")
            raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host_table.torch, "ones", lambda *_, **__: Kernel())
    assert not host_table.register(torch.zeros(4), COPY, Cuda(()))
    assert started == ["kernel"]


def test_an_engine_on_cuda_takes_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For every table that does not lie on the device."""

    asked = []
    monkeypatch.setattr(host_table, "open_host_table", lambda *given: asked.append(given) or "it")
    v, runtime = table_of(engine), engine.runtime
    place = loading._table
    assert place(runtime, v, "mmap", "cuda") == place(runtime, v, "host", "cuda") == "it"
    assert [given[2:] for given in asked] == [("mmap", "cuda"), ("host", "cuda")]
    assert torch.is_tensor(place(runtime, v, "host", "cpu"))
    assert load_engine(engine.path).embeds_on_device or len(asked) == 2
