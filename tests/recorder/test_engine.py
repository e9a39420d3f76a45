"""The builder and the runtime of the recorder: what they refuse, and what a step reads and
writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from g4ir.backends.trt.recorder import recorder


def logger(trt: Any) -> Any:
    """An ILogger that keeps errors."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            self.errors.append(msg)

    return Log()


def small_build(change: Callable[[Any, Any], None]) -> Any:
    """The builder's answer on a tiny network after a change, and what it logged."""
    trt = recorder()
    log = logger(trt)
    made = trt.Builder(log)
    network = made.create_network(0)
    x = network.add_input("x", trt.DataType.FLOAT, (-1, 4))
    out = network.add_unary(x, trt.UnaryOperation.NEG).get_output(0)
    out.name = "y"
    network.mark_output(out)
    config, profile = made.create_builder_config(), made.create_optimization_profile()
    profile.set_shape("x", (1, 4), (2, 4), (3, 4))
    change(config, profile)
    return trt, made.build_serialized_network(network, config), log


def test_profiles_cover_every_dim() -> None:
    cases: dict[str, Callable[[Any, Any], None]] = {
        "there is no profile": lambda c, p: None,
        "is no [-1, 4]": lambda c, p: (
            p.set_shape("x", (1, 5), (2, 5), (3, 5)),
            c.add_optimization_profile(p),
        ),
        "no input is called z": lambda c, p: (
            p.set_shape("z", (1,), (1,), (1,)),
            c.add_optimization_profile(p),
        ),
        "has no range": lambda c, p: (
            p._ranges.clear(),
            c.add_optimization_profile(p),
        ),
    }
    for message, change in cases.items():
        _, plan, log = small_build(change)
        assert plan is None and message in log.errors[0], message
    _, plan, _ = small_build(lambda c, p: c.add_optimization_profile(p))
    assert plan is not None
    with pytest.raises(ValueError, match="does not hold"):
        small_build(lambda c, p: p.set_shape("x", (3, 4), (2, 4), (3, 4)))


def test_flags_that_exclude_each_other() -> None:
    """A plan is stripped for equal weights; to refit some is another thing."""

    def change(config: Any, profile: Any) -> None:
        config.add_optimization_profile(profile)
        for name in ("STRIP_PLAN", "REFIT_INDIVIDUAL"):
            config.set_flag(getattr(config._module.BuilderFlag, name))

    _, plan, log = small_build(change)
    assert plan is None and "cannot be used together with STRIP_PLAN" in log.errors[0]


def test_contexts_check_what_they_are_given() -> None:
    trt, plan, log = small_build(lambda c, p: c.add_optimization_profile(p))
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    strategy = trt.ExecutionContextAllocationStrategy
    run = engine.create_execution_context(strategy.USER_MANAGED)
    x, y, memory = torch.ones(2, 4), torch.zeros(2, 4), torch.zeros(8192, dtype=torch.uint8)

    def fails(message: str) -> None:
        assert not run.execute_async_v3(0) and message in log.errors[-1]

    assert not run.set_optimization_profile_async(1, 0)
    assert not run.set_input_shape("x", (4, 4)) and "outside profile 0" in log.errors[-1]
    assert not run.set_input_shape("y", (2, 4)) and not run.set_tensor_address("w", 8)
    fails("no address for x, y")
    run.set_tensor_address("x", x.data_ptr())
    run.set_tensor_address("y", y.data_ptr())
    fails("bytes of device memory")
    run.set_device_memory(memory.data_ptr(), memory.numel())
    assert run.infer_shapes() == ["x"]
    fails("no shape for x")
    assert run.set_input_shape("x", (2, 4))
    run.set_tensor_address("y", x.data_ptr())
    fails("y lies over x")
    run.set_tensor_address("y", y.data_ptr())
    assert run.execute_async_v3(0) and torch.equal(y, -x)


def test_conditionals_are_not_recorded() -> None:
    """A network with one is refused where its step is being recorded."""
    trt, plan, log = small_build(lambda c, p: c.add_optimization_profile(p))
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    run = engine.create_execution_context()
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    run.set_input_shape("x", (2, 4))
    run.set_tensor_address("x", x.data_ptr())
    run.set_tensor_address("y", y.data_ptr())
    trt._capturing = True
    assert run.execute_async_v3(0) and torch.equal(y, -x)
    engine._network.add_if_conditional()
    assert not run.execute_async_v3(0) and "cannot be captured" in log.errors[-1]
