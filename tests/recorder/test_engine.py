"""The builder and the runtime of the recorder: what they refuse, and what a step reads and
writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from g4ir.backends.trt.recorder import engine as engines
from g4ir.backends.trt.recorder import recorder, taken_for_attention

ONES = torch.ones(4)


def logger(trt: Any) -> Any:
    """An ILogger that keeps errors."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            self.errors.append(msg)

    return Log()


def small_build(change: Callable[[Any, Any], None], first: Callable[..., Any] | None = None) -> Any:
    """The builder's answer on a tiny network after a change, and what it logged; `first` adds
    layers before its own."""
    trt = recorder()
    log = logger(trt)
    made = trt.Builder(log)
    network = made.create_network(0)
    x = network.add_input("x", trt.DataType.FLOAT, (-1, 4))
    of = first(network, x) if first else x
    out = network.add_unary(of, trt.UnaryOperation.NEG).get_output(0)
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


def test_compatible_engines_say_how_much_shared_memory_kernels_have() -> None:
    """By default they would have 48 KiB."""

    def change(config: Any, profile: Any, told: bool) -> None:
        config.add_optimization_profile(profile)
        level = config._module.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY
        config.hardware_compatibility_level = level
        if told:
            config.set_memory_pool_limit(
                config._module.MemoryPoolType.TACTIC_SHARED_MEMORY, 1 << 17
            )

    _, plan, log = small_build(partial(change, told=False))
    assert plan is None and "TACTIC_SHARED_MEMORY has no limit" in log.errors[0]
    assert small_build(partial(change, told=True))[1] is not None


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


def stepping(change: Callable[[Any, Any], None]) -> tuple[Any, Any, Any, tuple[Any, Any]]:
    """A module, its log, a context that can make a step, and what the step reads and writes."""
    trt, plan, log = small_build(change)
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    run = engine.create_execution_context()
    x, y = torch.ones(2, 4), torch.zeros(2, 4)
    run.set_input_shape("x", (2, 4))
    run.set_tensor_address("x", x.data_ptr())
    run.set_tensor_address("y", y.data_ptr())
    return trt, log, run, (x, y)


def test_steps_are_recorded_where_they_ran_before() -> None:
    """On the stream of the warm-up: a first step makes events and streams."""
    trt, log, run, _ = stepping(lambda c, p: c.add_optimization_profile(p))
    assert run.execute_async_v3(7)
    trt._capturing = True
    assert run.execute_async_v3(7)
    assert not run.execute_async_v3(8) and "stream 8: its first step" in log.errors[-1]


def test_addresses_are_aligned() -> None:
    _, _, run, (x, _) = stepping(lambda c, p: c.add_optimization_profile(p))
    odd = x.flatten()[1:].data_ptr()
    for tensor in "xy":
        with pytest.raises(ValueError, match=rf"{tensor} at .* is not aligned"):
            run.set_tensor_address(tensor, odd)
    with pytest.raises(ValueError, match=r"device memory at .* is not aligned"):
        run.set_device_memory(odd, 8192)


def test_shapes_that_do_not_go_together() -> None:
    """The binding makes an exception of TensorRT's answer."""

    def second(network: Any, x: Any) -> Any:
        trt = network._module
        other = network.add_input("z", trt.DataType.FLOAT, (-1, 4))
        for tensor in (x, other):
            tensor.set_dimension_name(0, "B")
        return network.add_elementwise(x, other, trt.ElementWiseOperation.SUM).get_output(0)

    def change(config: Any, profile: Any) -> None:
        profile.set_shape("z", (1, 4), (2, 4), (3, 4))
        config.add_optimization_profile(profile)

    trt, plan, log = small_build(change, second)
    run = trt.Runtime(log).deserialize_cuda_engine(plan).create_execution_context()
    run.set_input_shape("x", (2, 4))
    assert run.infer_shapes() == ["z"]
    run.set_input_shape("z", (3, 4))
    with pytest.raises(RuntimeError, match="B is 3, elsewhere 2"):
        run.infer_shapes()
    run.set_input_shape("z", (2, 4))
    assert run.infer_shapes() == []


def test_streamed_weights_have_a_budget() -> None:
    """TensorRT's own is worked out before caches exist; none can be set while a step could run."""

    def change(config: Any, profile: Any) -> None:
        config.add_optimization_profile(profile)
        config.set_flag(config._module.BuilderFlag.WEIGHT_STREAMING)

    def add_weights(network: Any, x: Any) -> Any:
        trt = network._module
        weights = trt.Weights(trt.DataType.FLOAT, ONES.data_ptr(), 4)
        held = network.add_constant((1, 4), weights).get_output(0)
        return network.add_elementwise(x, held, trt.ElementWiseOperation.SUM).get_output(0)

    trt, plan, log = small_build(change, add_weights)
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    with pytest.raises(ValueError, match="TensorRT's own is all memory that is free"):
        engine.create_execution_context()
    engine.weight_streaming_budget_v2 = engine.streamable_weights_size
    engine.create_execution_context()
    with pytest.raises(ValueError, match="before there are execution contexts"):
        engine.weight_streaming_budget_v2 = 0


def test_large_plans_are_written_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory there would be two of them."""
    trt, kept = recorder(), list[bytes]()
    network = trt.Builder(logger(trt)).create_network(0)
    weights = trt.Weights(trt.DataType.FLOAT, ONES.data_ptr(), 4)
    out = network.add_identity(network.add_constant((4,), weights).get_output(0)).get_output(0)
    out.name = "y"
    network.mark_output(out)

    class Writer(trt.IStreamWriter):
        def write(self, data: bytes) -> int:
            kept.append(data)
            return len(data)

    monkeypatch.setattr(engines, "MAX_HELD", 16)
    plan = trt.Builder(logger(trt)).build_serialized_network(network, config_of(trt))
    monkeypatch.setattr(engines, "MAX_HELD", 15)
    built = trt.Builder(logger(trt))
    with pytest.raises(ValueError, match="16 bytes of weights: build_serialized_network_to_stream"):
        built.build_serialized_network(network, config_of(trt))
    assert built.build_serialized_network_to_stream(network, config_of(trt), Writer())
    assert len(kept) > 1 and b"".join(kept) == plan


def test_what_a_rule_says_is_in_the_builders_log() -> None:
    """As TensorRT's own words are, which says nothing more to who called it."""
    trt = recorder()
    log = logger(trt)
    network = trt.Builder(log).create_network(0)
    x = network.add_input("x", trt.DataType.FLOAT, (2, 4))
    with pytest.raises(ValueError, match="ranks must be equal"):
        network.add_matrix_multiply(
            *(x, trt.MatrixOperation.NONE),
            *(network.add_input("y", trt.DataType.FLOAT, (4,)), trt.MatrixOperation.NONE),
        )
    assert "ranks must be equal" in log.errors[0]
    wrong = network.add_softmax(x)
    wrong.axes = 3
    with pytest.raises(ValueError, match="one axis"):
        tuple(wrong.get_output(0).shape)
    assert "one axis" in log.errors[-1]


@pytest.mark.parametrize("mask", ["added", "chosen", "none", "constant"])
def test_attention_with_a_mask(mask: str) -> None:
    """Refused where it is said to be; a bias that is a constant is none."""
    trt = recorder()
    network = trt.Builder(logger(trt)).create_network(0)
    a, b = (network.add_input(n, trt.DataType.FLOAT, (1, 2, 4, 4)) for n in "ab")
    none = trt.MatrixOperation.NONE
    scores = network.add_matrix_multiply(a, none, b, none).get_output(0)
    ones = network.add_constant((1, 1, 1, 4), trt.Weights(trt.DataType.FLOAT, ONES.data_ptr(), 4))
    fixed, added = ones.get_output(0), trt.ElementWiseOperation.SUM
    masked = {
        "added": lambda: network.add_elementwise(scores, a, added),
        "chosen": lambda: network.add_select(
            network.add_input("mask", trt.DataType.BOOL, (1, 1, 4, 4)), scores, fixed
        ),
        "none": lambda: network.add_activation(scores, trt.ActivationType.TANH),
        "constant": lambda: network.add_elementwise(scores, fixed, added),
    }[mask]()
    soft = network.add_softmax(masked.get_output(0))
    soft.axes, soft.name = 8, "L0.attn/softmax"
    out = network.add_matrix_multiply(soft.get_output(0), none, b, none).get_output(0)
    found = ["L0.attn/softmax"] if mask in ("added", "chosen") else []
    assert taken_for_attention(network) == found
    out.name = "y"
    network.mark_output(out)
    for least in (0, len(network._layers) + 1, None):
        trt._wraps_from = least
        log = logger(trt)
        plan = trt.Builder(log).build_serialized_network(network, config_of(trt))
        assert (plan is None) == (bool(found) and least == 0), least
        assert not log.errors or log.errors[0].startswith("wrap_attention: L0.attn/softmax")


def config_of(trt: Any) -> Any:
    return trt.Builder(logger(trt)).create_builder_config()


def test_conditionals_are_not_recorded() -> None:
    """A network with one is refused where its step is being recorded."""
    trt, log, run, (x, y) = stepping(lambda c, p: c.add_optimization_profile(p))
    assert run.execute_async_v3(0)
    trt._capturing = True
    assert run.execute_async_v3(0) and torch.equal(y, -x)
    run.engine._network.add_if_conditional()
    assert not run.execute_async_v3(0) and "a conditional's side" in log.errors[-1]
