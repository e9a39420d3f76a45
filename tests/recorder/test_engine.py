"""The builder and the runtime of the recorder: what they refuse, and what a step reads and
writes; several ranks too."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from g4ir.backends.trt.recorder import RuleError, communicator, execute, side_by_side
from tests.recorder.networks import Net

ONES = torch.ones(1, 4)
SPAN = (1, 4), (2, 4), (3, 4)


class Small:
    """A tiny network, its builder, and what is set beside it: x [-1, 4] -> y = exp(x + ones)."""

    def __init__(self, version: str = "11.4.0", make: Callable[[Net], Any] | None = None) -> None:
        self.net, self.errors = Net(version), list[str]()
        trt = self.trt = self.net.trt
        errors = self.errors

        class Log(trt.ILogger):
            def log(self, severity: Any, msg: str) -> None:
                errors.append(msg)

        self.log = Log()
        self.builder = trt.Builder(self.log)
        self.net.network = self.builder.create_network(self.net.network._flags)
        self.config = self.builder.create_builder_config()
        self.profile = self.builder.create_optimization_profile()
        if make:
            self.net.output(make(self.net))
            return
        x = self.net.x(-1, 4)
        self.net.output(self.net.exp(self.net.binary(x, self.net.constant(ONES))))
        self.profile.set_shape("x0", *SPAN)
        self.config.add_optimization_profile(self.profile)

    def plan(self) -> Any:
        return self.builder.build_serialized_network(self.net.network, self.config)

    def engine(self) -> Any:
        return self.trt.Runtime(self.log).deserialize_cuda_engine(self.plan())


def refused(change: Callable[[Small], Any], message: str) -> None:
    small = Small()
    change(small)
    assert small.plan() is None and message in small.errors[0], small.errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.config._profiles.clear(), "there is no profile"),
        (lambda s: s.profile.set_shape("x0", (1, 5), (2, 5), (3, 5)), "[1, 5] does not fit"),
        (lambda s: s.profile._ranges.clear(), "has no range"),
        (
            lambda s: setattr(
                s.config,
                "hardware_compatibility_level",
                s.trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY,
            ),
            "TACTIC_SHARED_MEMORY has no limit",
        ),
        (lambda s: s.config.set_flag(s.trt.BuilderFlag.STRIP_PLAN), "has no name under which"),
    ],
)
def test_configurations(change: Callable[[Small], Any], message: str) -> None:
    refused(change, message)
    with pytest.raises(ValueError, match="does not hold"):
        Small().profile.set_shape("x0", (3, 4), (2, 4), (3, 4))


def test_contexts_check_what_they_are_given() -> None:
    small = Small()
    engine, strategy = small.engine(), small.trt.ExecutionContextAllocationStrategy
    run = engine.create_execution_context(strategy.USER_MANAGED)
    x, y, memory = torch.ones(2, 4), torch.zeros(2, 4), torch.zeros(8192, dtype=torch.uint8)

    def fails(message: str) -> None:
        assert not run.execute_async_v3(0) and message in small.errors[-1]

    assert not run.set_optimization_profile_async(1, 0)
    assert not run.set_input_shape("x0", (4, 4)) and "outside profile 0" in small.errors[-1]
    assert not run.set_input_shape("y", (2, 4)) and not run.set_tensor_address("w", 8)
    fails("no address for x0, y")
    run.set_tensor_address("x0", x.data_ptr())
    run.set_tensor_address("y", y.data_ptr())
    fails("bytes of device memory")
    run.set_device_memory(memory.data_ptr(), memory.numel())
    assert run.infer_shapes() == ["x0"]
    fails("no shape for x0")
    assert run.set_input_shape("x0", (2, 4))
    run.set_tensor_address("y", x.data_ptr())
    fails("y lies over x0")
    run.set_tensor_address("y", y.data_ptr())
    assert run.execute_async_v3(7) and torch.equal(y, (x + 1).exp())
    small.trt._capturing = True
    assert run.execute_async_v3(7)
    fails("stream 0: its first step")


def test_shapes_that_do_not_go_together() -> None:
    """The binding makes an exception of TensorRT's answer."""

    def two(n: Net) -> Any:
        for tensor in (n.x(-1, 4), n.x(-1, 4)):
            tensor.set_dimension_name(0, "B")
        return n.binary(*n.network._inputs)

    small = Small(make=two)
    for name in ("x0", "x1"):
        small.profile.set_shape(name, *SPAN)
    small.config.add_optimization_profile(small.profile)
    run = small.engine().create_execution_context()
    run.set_input_shape("x0", (2, 4))
    assert run.infer_shapes() == ["x1"]
    run.set_input_shape("x1", (3, 4))
    with pytest.raises(RuntimeError, match="B is 3, elsewhere 2"):
        run.infer_shapes()


def test_streamed_weights_have_a_budget() -> None:
    """TensorRT's own is worked out before caches exist; none can be set while a step could run."""
    small = Small()
    small.config.set_flag(small.trt.BuilderFlag.WEIGHT_STREAMING)
    engine = small.engine()
    with pytest.raises(ValueError, match="TensorRT's own is all memory that is free"):
        engine.create_execution_context()
    engine.weight_streaming_budget_v2 = engine.streamable_weights_size
    engine.create_execution_context()
    with pytest.raises(ValueError, match="before there are execution contexts"):
        engine.weight_streaming_budget_v2 = 0


def test_what_a_rule_says_is_in_the_builders_log() -> None:
    """As TensorRT's own words are, which says nothing more to who called it."""
    small = Small()
    wrong = small.net.product(small.net.x(2, 4), small.net.x(4))
    with pytest.raises(ValueError, match="ranks must be equal"):
        tuple(wrong.shape)
    assert "ranks must be equal" in small.errors[-1]


# --- several ranks ----------------------------------------------------------------------------


def exchanging(op: str, ranks: int, dtype: str = "FLOAT") -> Any:
    n = Net()
    n.output(n.exchange(n.x(-1, 3, dtype=dtype), op, ranks, tuple(range(ranks))))
    return n.network


def test_a_rank_that_fails_ends_the_others() -> None:
    net = exchanging("ALL_REDUCE", 2)

    def work(rank: int, exchange: Any) -> Any:
        if rank:
            raise LookupError("rank 1 has no weights")
        return execute(net, {"x0": torch.zeros(1, 3)}, exchange)

    with pytest.raises(LookupError, match="rank 1 has no weights"):
        side_by_side(2, work)
    with pytest.raises(RuleError, match="nobody to exchange with"):
        execute(net, {"x0": torch.zeros(1, 3)})
    with pytest.raises(RuleError, match="3 ranks run, num_ranks is 2"):
        execute(net, {"x0": torch.zeros(1, 3)}, lambda x: [x, x, x])


def of_two(n: Net) -> Any:
    return n.exchange(n.x(2, 3))


def test_contexts_ask_for_a_communicator() -> None:
    small = Small(make=of_two)
    run, x, y = small.engine().create_execution_context(), torch.ones(2, 3), torch.zeros(2, 3)
    capsule: Any = partial(ctypes.pythonapi.PyCapsule_New)
    capsule.func.restype = ctypes.py_object
    capsule.func.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    for name, t in ("x0", x), ("y", y):
        run.set_tensor_address(name, t.data_ptr())
    assert not run.execute_async_v3(0) and "no communicator" in small.errors[-1]
    assert not run.set_communicator(capsule(1 << 60, None, None))
    assert run.set_communicator(capsule(communicator(lambda x: [x, 2 * x]), None, None))
    assert run.execute_async_v3(0) and torch.equal(y, 3 * x)
