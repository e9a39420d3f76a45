"""The stand-in for `tensorrt`: each of its rules fires, and its layers mean what is documented."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from g4ir.backends.trt.recorder import RuleError, aliases, check, execute, scratch_bytes
from tests.recorder.networks import Net

TABLE: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text())
RULES: Mapping[str, str] = TABLE["refused"]
TAKEN = [f"{method} {given}" for method, rows in TABLE["taken"].items() for given in rows]
CODES = torch.tensor([[-127, 0, 3], [127, -5, 1]], dtype=torch.int8)


def cache(n: Net) -> Any:
    held, new = (n.x(2, 4, slots, 8, dtype="HALF") for slots in (16, 3))
    return n.append(held, new, n.x(2, dtype="INT32"))


def attend(n: Net, *mask: int) -> Any:
    tensors = n.x(2, 4, 3, 8), n.x(2, 2, 5, 8), n.x(2, 2, 5, 8)
    return n.attention(*tensors, n.x(*mask, dtype="BOOL"))


def codes(n: Net, scales: int = 2, dtype: torch.dtype = torch.int8, **how: Any) -> Any:
    return n.dequantized(n.constant(CODES.to(dtype)), n.constant(torch.ones(scales)), **how)


def computed_size(n: Net) -> Any:
    layer = n.network.add_slice(n.x(4), (0,), (1,), (1,))
    layer.set_input(2, n.x(1, dtype="INT32"))
    return n.set(layer, axes=(0,))


def written(n: Net, text: str) -> Any:
    """What a row of rules.yaml is about."""
    method, *words = text.split()
    tensors, given = list[Any](), dict[str, Any]()
    for word in words:
        key, equals, value = word.partition("=")
        dims, _, dtype = word.partition(":")
        if equals:
            given[key] = yaml.safe_load(value)
        else:
            tensors.append(n.x(*map(int, dims.split(",")), dtype=dtype or "FLOAT"))
    return getattr(n, method)(*tensors, **given)


@pytest.mark.parametrize(("text", "message"), [*RULES.items(), *TABLE["refused here"].items()])
def test_rules(text: str, message: str) -> None:
    n = Net()
    with pytest.raises(RuleError, match=message):
        n.output(written(n, text))
        check(n.network)


#: those that a line cannot say
OTHER_RULES: tuple[tuple[Callable[[Net], Any], str], ...] = (
    (computed_size, "shape tensors"),
    (lambda n: (n.x(2, name="a"), n.x(2, name="a")), "a name of its own"),
    (lambda n: codes(n, dtype=torch.int32), "takes FP8, INT4, INT8"),
    (lambda n: codes(n, to="HALF"), "has its type"),
    (lambda n: codes(n, axis=1), "one for each entry of axis 1"),
    (lambda n: n.append(n.exp(n.x(2, 4, 16, 8)), n.x(2, 4, 1, 8), n.x(2, dtype="INT32")), "input"),
    (lambda n: n.output(n.exp(cache(n))), "its output is no output of the network"),
    (
        lambda n: n.output(n.exchange(n.exchange(n.x(2)), ranks=3, groups=(0, 1, 2))),
        r"collectives of \[2, 3\] ranks",
    ),
    (lambda n: [n.exp(n.x(2))], "has no output"),
    (lambda n: n.output(n.concat(n.held("INT8"), n.held("INT8"))), "are dequantised, nothing else"),
    (lambda n: n.network.mark_output(n.exp(n.x(2))), "has a name"),
    (lambda n: [n.output(n.exp(n.x(2))) for _ in range(2)], "are called y"),
    (lambda n: n.network.mark_output(n.x(2)), "cannot be an output"),
)


@pytest.mark.parametrize(("build", "message"), OTHER_RULES)
def test_other_rules(build: Callable[[Net], Any], message: str) -> None:
    n = Net()
    with pytest.raises(RuleError, match=message):
        build(n)
        check(n.network)


@pytest.mark.parametrize("text", TAKEN)
def test_legal_forms(text: str) -> None:
    n = Net()
    n.output(written(n, text))
    check(n.network)


# --- the module -------------------------------------------------------------------------------


def test_calls_are_recorded() -> None:
    n = Net()
    n.trt.calls.clear()
    layer = n.network.add_softmax(input=n.x(2, 3))
    layer.axes = 2
    assert layer.get_output(0).shape == (2, 3)
    seen = [(c.owner, c.member, c.kind) for c in n.trt.calls]
    assert seen[-4:] == [
        ("INetworkDefinition", "add_softmax", "call"),
        ("ISoftMaxLayer", "axes", "set"),
        ("ISoftMaxLayer", "get_output", "call"),
        ("ITensor", "shape", "get"),
    ]
    assert list(n.trt.calls[-4].kwargs or ()) == ["input"] and n.trt.calls[-3].args == (2,)
    with pytest.raises(TypeError):
        n.network.add_softmax()
    with pytest.raises(AttributeError):
        n.x(2).dtype = 1


# --- what layers mean -------------------------------------------------------------------------


def run(n: Net, tensor: Any, **feeds: torch.Tensor) -> torch.Tensor:
    n.output(tensor)
    return execute(n.network, feeds)["y"]


def test_deep_networks() -> None:
    """Layers are typed in order, not each by those before it on one stack."""
    n = Net()
    x = n.x(1, 4)
    for _ in range(sys.getrecursionlimit()):
        x = n.exp(x)
        assert x.shape == (1, 4)
    n.output(x)
    assert scratch_bytes(n.network, {}) == 2 * 4 * 4


def test_cache_update_is_in_place() -> None:
    n = Net()
    n.output(cache(n), "next")
    held, new = torch.zeros(2, 4, 16, 8).half(), torch.ones(2, 4, 3, 8).half()
    feeds = {"x0": held, "x1": new, "x2": torch.tensor([0, 13], dtype=torch.int32)}
    assert execute(n.network, feeds)["next"].data_ptr() == held.data_ptr()
    assert held[0, :, :3].eq(1).all() and held[1, :, 13:].eq(1).all() and held.sum() == 192
    assert aliases(n.network) == {"next": "x0"}
    feeds["x2"] = torch.tensor([0, 14], dtype=torch.int32)
    with pytest.raises(RuleError, match="14 to 17"):
        execute(n.network, feeds)


def test_shape_tensors_are_followed() -> None:
    """A slice whose size is another tensor's: it is known where inputs have shapes."""
    n = Net()
    size = n.slice(n.set(n.network.add_shape(n.x(-1))), 0, 1)
    size = n.binary(size, n.constant(torch.tensor([8])), "MIN")
    layer = n.network.add_slice(n.x(2, 8, 4), (0,), (0,), (1,))
    layer.axes = (1,)
    layer.set_input(2, size)
    assert layer.get_output(0).shape == (2, -1, 4)
    feeds = {"x0": torch.zeros(5), "x1": torch.zeros(2, 8, 4)}
    assert run(n, n.exp(layer.get_output(0)), **feeds).shape[1] == 5
    assert scratch_bytes(n.network, {"x0": (9,)}) == 64 * 4 + 8  # and its size


def test_bytes_that_are_there_at_a_time() -> None:
    """Of tensors between layers; a view is no copy, inputs, outputs and constants lie elsewhere."""
    n = Net()
    n.output(n.exp(n.exp(n.reshape(n.exp(n.exp(n.x(-1, 4))), (4, -1)))))
    assert scratch_bytes(n.network, {"x0": (100, 4)}) == 2 * 100 * 4 * 4


def test_weights() -> None:
    """They are read where they lie; a network without them can be checked, not run."""
    n, w = Net(), torch.ones(2)
    tensor = n.constant(w)
    w.fill_(3)
    assert run(n, tensor).tolist() == [3, 3]
    n = Net()
    with pytest.raises(RuleError, match="without memory"):
        run(n, n.absent("FLOAT", 3))


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "not fed, .*: x0, x1"),
        ({"x0": torch.zeros(2), "x1": torch.zeros(1)}, r"x0: HALF\[-1\]: found torch.float32\[2\]"),
        ({"x0": torch.zeros(2), "x1": torch.zeros(1), "z": torch.zeros(2)}, "this network: z"),
        ({"x0": torch.zeros(3).half(), "x1": torch.zeros(1).half()}, "B is 1, elsewhere 3"),
    ],
)
def test_feeds_are_checked(feeds: dict[str, torch.Tensor], message: str) -> None:
    """Dims of one name are equal too."""
    n = Net()
    for tensor in (n.x(-1, dtype="HALF"), n.x(-1, dtype="HALF")):
        tensor.set_dimension_name(0, "B")
    n.output(n.binary(*n.network._inputs))
    with pytest.raises(RuleError, match=message):
        execute(n.network, feeds)
