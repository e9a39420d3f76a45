"""Several ranks on the recorder: what they exchange, and what becomes of them where one fails."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from g4ir.backends.trt.recorder import (
    RuleError,
    communicator,
    execute,
    recorder,
    side_by_side,
)
from tests.recorder.networks import Net
from tests.recorder.test_engine import logger


def capsule(address: int) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return make(address, None, None)


def network(op: str, ranks: int, dtype: str = "FLOAT") -> Net:
    n = Net()
    reduce = "SUM" if op == "ALL_REDUCE" else "NONE"
    n.output(n.exchange(n.x(-1, 3, dtype=dtype), op, reduce, ranks, groups=tuple(range(ranks))))
    return n


def exchanged(op: str, parts: torch.Tensor, dtype: str = "FLOAT") -> list[torch.Tensor]:
    """What each rank has of the parts of all."""
    nets = [network(op, len(parts), dtype).network for _ in parts]
    return side_by_side(
        len(parts), lambda rank, ex: execute(nets[rank], {"x0": parts[rank]}, ex)["y"]
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_exchanged(ranks: int) -> None:
    """Sums, and what lies behind one another along the first dim, alike on all ranks."""
    parts = torch.randn(ranks, 2, 3)
    for op, want in ("ALL_REDUCE", parts.sum(0)), ("ALL_GATHER", parts.reshape(-1, 3)):
        made = exchanged(op, parts)
        assert all(torch.equal(y, made[0]) and torch.allclose(y, want) for y in made)


def test_sums_are_rounded_on_their_way() -> None:
    """In the dtype that is exchanged: 256 + 1 is 256 in bf16, twice."""
    parts = torch.tensor([256.0, 1.0, 1.0]).bfloat16()[:, None].expand(3, 3).reshape(3, 1, 3)
    made = exchanged("ALL_REDUCE", parts, "BF16")
    assert made[0].tolist() == [[256.0] * 3]


def test_a_rank_that_fails_ends_the_others() -> None:
    net = network("ALL_REDUCE", 2).network

    def work(rank: int, exchange: Any) -> Any:
        if rank:
            raise LookupError("rank 1 has no weights")
        return execute(net, {"x0": torch.zeros(1, 3)}, exchange)

    with pytest.raises(LookupError, match="rank 1 has no weights"):
        side_by_side(2, work)


def test_a_rank_alone() -> None:
    net = network("ALL_REDUCE", 3)
    with pytest.raises(RuleError, match="nobody to exchange with"):
        execute(net.network, {"x0": torch.zeros(1, 3)})
    alone = network("ALL_REDUCE", 3).network
    with pytest.raises(RuleError, match="2 ranks run, num_ranks is 3"):
        execute(alone, {"x0": torch.zeros(1, 3)}, lambda x: [x, x])


def built(version: str, preview: bool) -> Any:
    """An engine of two ranks, or None, and what was logged."""
    n = Net(version)
    trt, log = n.trt, logger(n.trt)
    builder = trt.Builder(log)
    n.network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    n.output(n.exchange(n.x(2, 3)))
    config = builder.create_builder_config()
    if preview:
        config.set_preview_feature(trt.PreviewFeature.MULTIDEVICE_RUNTIME_10_16, True)
    plan = builder.build_serialized_network(n.network, config)
    return plan and trt.Runtime(log).deserialize_cuda_engine(plan), log


def test_the_older_version_asks_for_a_feature() -> None:
    """The newer one has none."""
    engine, log = built("10.16.1", preview=False)
    assert engine is None and "MULTIDEVICE_RUNTIME_10_16 is not enabled" in log.errors[0]
    assert built("10.16.1", preview=True)[0] and built("11.4.0", preview=False)[0]
    assert "MULTIDEVICE_RUNTIME_10_16" not in recorder("11.4.0").PreviewFeature.__members__


def test_contexts_ask_for_a_communicator() -> None:
    engine, log = built("11.4.0", preview=False)
    run, x, y = engine.create_execution_context(), torch.ones(2, 3), torch.zeros(2, 3)
    for name, t in ("x0", x), ("y", y):
        run.set_tensor_address(name, t.data_ptr())
    assert not run.execute_async_v3(0) and "no communicator" in log.errors[-1]
    assert not run.set_communicator(capsule(1 << 60)) and "no communicator lies" in log.errors[-1]
    assert run.set_communicator(capsule(communicator(lambda x: [x, 2 * x])))
    assert run.execute_async_v3(0) and torch.equal(y, 3 * x)
