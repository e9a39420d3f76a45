"""Products of quantised weights in tiles as an ARM CPU with integer products computes them (NEON),
under qemu. It needs Debian's gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user-static."""

from __future__ import annotations

import subprocess
from pathlib import Path
from shutil import which

import numpy as np
import pytest
import torch

from g4ir.backends.cpu import library as cpu_library
from g4ir.backends.cpu import pyops
from g4ir.ops.codecs import fake_quantize_values, to_tiles
from tests.coded_products import (
    BUDGET,
    GROUPS,
    cpu_kernels,  # noqa: F401
    with_outliers,
)
from tests.step_ops import linear_coded

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (which(COMPILER) and which(EMULATOR)), reason=f"no {COMPILER} or qemu"),
    pytest.mark.usefixtures("cpu_kernels"),
]
ROWS, OUTS, WIDTH = 8, 48, 1024
#: fp8 has no tiles there, nor have scales of 16 values
CASES = [weight for weight in GROUPS if weight[0] != "fp8" and weight[1] != 16]


@pytest.fixture(scope="module", params=["armv8.2-a+dotprod", "armv8-a"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for CPUs with integer products, and for those without."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = [f for f in cpu_library.KERNEL_FLAGS if f != "-fPIC"]
    flags += [f"-march={request.param}", f"-I{cpu_library.SOURCES}"]

    def compiled(name: str, *words: str | Path) -> Path:
        subprocess.run([COMPILER, *flags, *words, "-o", folder / name], check=True)
        return folder / name

    objects = [
        compiled(f"{i}.o", "-c", *options, cpu_library.SOURCES / source)
        for i, (source, *options) in enumerate(cpu_library.OBJECTS)
    ]
    source = Path(__file__).with_name("products.c")
    return compiled("products", "-static", source, *objects, "-lm")


def data(t: torch.Tensor) -> bytes:
    return t.contiguous().view(torch.uint8).numpy().tobytes()


def products(
    program: Path,
    codes: torch.Tensor,
    scales: torch.Tensor,
    xs: list[torch.Tensor],
    rounded: bool = False,
) -> list[torch.Tensor]:
    """Return the products of a weight in tiles with several x, as the emulated CPU makes them."""
    form, kind, request = pyops.FORMAT_IDS[codes.dtype], pyops.DTYPES[scales.dtype], b""
    for x in xs:
        parts = [*map(data, (codes, scales, x))]
        sizes = (len(x), OUTS, x.shape[1], scales.shape[1], *map(len, parts))
        request += np.array([form, 1, kind, rounded, *sizes], np.int64).tobytes() + b"".join(parts)
    done = subprocess.run([EMULATOR, program], input=request, capture_output=True, check=True)
    outputs = torch.from_numpy(np.frombuffer(done.stdout, np.int16).copy()).view(torch.bfloat16)
    return [t.view(-1, OUTS) for t in outputs.split([len(x) * OUTS for x in xs])]


@pytest.mark.parametrize("weight", CASES, ids=lambda w: "-".join(map(str, w)))
def test_products_of_tiles(program: Path, weight: tuple[str, int, str]) -> None:
    """Within the budget for one row to eight, of which each has the same bits beside others; and
    bit by bit what this CPU makes."""
    x, codes, scales, dense = with_outliers(ROWS, OUTS, WIDTH, weight, torch.bfloat16)
    laid = to_tiles(codes), to_tiles(scales)
    every = products(program, *laid, [x[:rows] for rows in range(1, ROWS + 1)])
    want = x.double() @ dense.T
    assert (every[-1] - want).abs().amax() <= BUDGET[torch.bfloat16] * want.abs().amax()
    for rows, got in enumerate(every, 1):
        assert torch.equal(got, every[-1][:rows])
        if "dotprod" in program.parent.name:
            assert torch.equal(got, linear_coded(x[:rows], *laid, True))


@pytest.mark.parametrize("weight", CASES, ids=lambda w: "-".join(map(str, w)))
@pytest.mark.parametrize("rounded", [False, True])
def test_prompts(program: Path, weight: tuple[str, int, str], rounded: bool) -> None:
    """More rows than are multiplied with codes as they are."""
    if rounded and "dotprod" not in program.parent.name:
        pytest.skip("a CPU without integer products rounds rows first")
    x, codes, scales, dense = with_outliers(61, OUTS, WIDTH, weight, torch.bfloat16)
    (got,) = products(program, to_tiles(codes), to_tiles(scales), [x], rounded=rounded)
    want = (fake_quantize_values(x.double(), "int8") if rounded else x.double()) @ dense.T
    assert (got - want).abs().amax() <= BUDGET[torch.bfloat16] * want.abs().amax()
