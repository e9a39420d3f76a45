"""`tensorrt.plugin` as the recorder has it: registration, shapes, launches, meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from g4ir.backends.trt.recorder import Meaning, RuleError, execute, recorder
from tests.recorder.networks import new_network


def doubling(plugin: str, attributes: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The meaning of the plugin below: x twice along the last dim, times a factor."""
    assert plugin == "mine::double"
    return (torch.cat([x, x], -1) * attributes["factor"],)


def module_with_plugin(meaning: Meaning | None = doubling) -> Any:
    trt = recorder(meaning=meaning)
    trtp = trt.plugin

    def describe(x: trtp.TensorDesc, factor: int) -> trtp.TensorDesc:
        rows, size = x.shape_expr
        return trtp.from_shape_expr((rows, size * 2), x.dtype)

    def implement(
        x: trtp.TensorDesc, factor: int, outputs: tuple[trtp.TensorDesc], tactic: int
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        launch, whole = trtp.KernelLaunchParams(), trtp.SymIntExprs(1)
        launch.grid_x = trtp.cdiv(x.shape_expr[0], 4)
        launch.block_x, launch.shared_mem = 128, factor * 1024
        whole[0] = trtp.SymInt32(x.shape_expr[1])
        return "double", "ptx", launch, whole

    for f in (describe, implement):  # annotations of this file are texts
        f.__annotations__ = {n: _kind(trtp, a) for n, a in f.__annotations__.items()}
    trtp.register("mine::double")(describe)
    trtp.aot_impl("mine::double")(implement)
    return trt


def _kind(trtp: Any, annotation: str) -> Any:
    kinds = {"int": int, "trtp.TensorDesc": trtp.TensorDesc}
    whole = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
    return kinds.get(annotation, tuple[trtp.TensorDesc] if "Launch" not in annotation else whole)


def network_of(trt: Any, factor: int = 3) -> tuple[Any, Any]:
    network = new_network(trt)
    x = network.add_input("x", trt.DataType.FLOAT, (-1, 5))
    layer = network.add_plugin(trt.plugin.op.mine.double(x, factor=factor), True)
    y = layer.get_output(0)
    y.name = "y"
    network.mark_output(y)
    return network, layer


def test_types_and_meaning() -> None:
    network, layer = network_of(module_with_plugin())
    assert layer.get_output(0).shape == (-1, 10)
    x = torch.ones(2, 5)
    assert torch.equal(execute(network, {"x": x})["y"], torch.full((2, 10), 3.0))


def test_a_meaning_of_other_shapes_is_found() -> None:
    network, _ = network_of(module_with_plugin(lambda plugin, attributes, x: (x,)))
    with pytest.raises(RuleError, match=r"found torch.float32\[2, 5\]"):
        execute(network, {"x": torch.ones(2, 5)})


def test_without_a_meaning_a_network_can_be_checked() -> None:
    network, layer = network_of(module_with_plugin(None))
    assert layer.get_output(0).shape == (-1, 10)
    with pytest.raises(RuleError, match="mine::double: say what it computes"):
        execute(network, {"x": torch.ones(2, 5)})


def test_launch() -> None:
    trt = module_with_plugin()
    launch = network_of(trt)[1].plugin.launch([(trt.DataType.FLOAT, (9, 5))])
    assert (launch.name, launch.ptx, launch.whole) == ("double", "ptx", [5])
    assert (launch.params["grid_x"], launch.params["shared_mem"]) == (3, 3072)


@pytest.mark.parametrize(("factor", "fits"), [(48, True), (49, False)])
def test_shared_memory_of_a_launch(factor: int, fits: bool) -> None:
    """Each has 48 KiB; more only where the recorder is told so."""
    trt = module_with_plugin()
    log = type("Log", (trt.ILogger,), {"log": lambda self, severity, msg: said.append(msg)})()
    said: list[str] = []
    builder = trt.Builder(log)
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    profile.set_shape("x", (1, 5), (1, 5), (8, 5))
    config.add_optimization_profile(profile)
    network, _ = network_of(trt, factor)
    assert (builder.build_serialized_network(network, config) is not None) == fits
    assert fits or "50176 bytes of dynamic shared memory, of 49152" in said[0]


WRONG: dict[str, Callable[[Any], Any]] = {
    "again": lambda trt: trt.plugin.register("mine::double")(lambda: None),
    "of TensorRT": lambda trt: trt.plugin.register("trt::double"),
    "default": lambda trt: trt.plugin.register("mine::other")(lambda x=1: None),
    "not a tensor": lambda trt: trt.plugin.op.mine.double(torch.ones(2), factor=3),
    "attribute": lambda trt: trt.plugin.op.mine.double(
        new_network(trt).add_input("x", trt.DataType.FLOAT, (2, 5)), factor="3"
    ),
    "two numbers": lambda trt: trt.plugin.cdiv(3, 4),
    "just in time": lambda trt: new_network(trt).add_plugin(lambda: None, False),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError):
        WRONG[wrong](module_with_plugin())


def test_sizes_have_no_reflected_operators() -> None:
    """As in the real module: a plain number does not stand on the left."""
    size = recorder().plugin.ShapeExpr(4)
    assert (size * 2).value == 8
    with pytest.raises(TypeError):
        2 * size
