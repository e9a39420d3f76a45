"""The stand-in for `tensorrt`: each of its rules fires, and its layers mean what is documented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from g4ir.backends.trt.recorder import (
    VERSIONS,
    RuleError,
    aliases,
    check,
    execute,
    recorder,
    sizes,
    traffic,
    volumes,
)
from tests.recorder.networks import Net

Build = Callable[[Net], Any]


# --- rules ------------------------------------------------------------------------------------


def _select(n: Net) -> Any:
    return n.network.add_select(n.x(2, dtype="BOOL"), n.x(2), n.x(2, dtype="HALF"))


def _concat(n: Net, *tensors: Any, axis: int = 0) -> Any:
    layer = n.network.add_concatenation(list(tensors))
    layer.axis = axis
    return layer.get_output(0).shape


def _slice(n: Net, *parts: tuple[int, ...], axes: tuple[int, ...] | None = None) -> Any:
    layer = n.network.add_slice(n.x(4, 5), *parts)
    if axes is not None:
        layer.axes = axes
    return layer.get_output(0).shape


def _masked(n: Net, mask: Any, kind: str = "NONE", q: tuple[int, ...] = (2, 4, 3, 8)) -> Any:
    layer = n.attention(n.x(*q), n.x(2, 2, 5, 8), n.x(2, 2, 5, 8), kind)
    layer.mask = mask
    return layer.get_output(0).shape


def _topk(n: Net, x: Any, k: int, axes: int = 2) -> Any:
    return n.network.add_topk(x, n.trt.TopKOperation.MAX, k, axes)


def _gather_nd(n: Net, x: Any, index: Any, shared: int) -> Any:
    layer = n.network.add_gather_v2(x, index, n.trt.GatherMode.ND)
    layer.num_elementwise_dims = shared
    return layer.get_output(0).shape


def _conditional(n: Net, then: Build, other: Build, condition: Any = None) -> Any:
    made = n.network.add_if_conditional()
    made.set_condition(n.x(dtype="BOOL") if condition is None else condition)
    n.made = made  # type: ignore[attr-defined]
    return made.add_output(then(n), other(n)).get_output(0)


def _entered(n: Net, x: Any) -> Any:
    return n.made.add_input(x).get_output(0)  # type: ignore[attr-defined]


def _outer_read(n: Net) -> None:
    x = n.x(2)
    n.output(_conditional(n, lambda n: n.exp(x), lambda n: _entered(n, x)))
    check(n.network)


def _inner_read(n: Net) -> None:
    x, seen = n.x(2), []

    def then(n: Net) -> Any:
        seen.append(n.exp(_entered(n, x)))
        return seen[0]

    n.output(_conditional(n, then, lambda n: _entered(n, x)))
    n.output(n.exp(seen[0]), "z")
    check(n.network)


def _shared_inside(n: Net) -> None:
    x, seen = n.x(2), []

    def then(n: Net) -> Any:
        seen.append(n.exp(_entered(n, x)))
        return seen[0]

    n.output(_conditional(n, then, lambda n: n.exp(seen[0])))
    check(n.network)


def _cache(n: Net, new: tuple[int, ...] = (2, 4, 3, 8), **kinds: Any) -> Any:
    cache = n.x(2, 4, kinds.get("slots", 16), 8, dtype=kinds.get("dtype", "HALF"))
    update = n.x(*new, dtype=kinds.get("update", "HALF"))
    return n.append(cache, update, n.x(2, dtype=kinds.get("at", "INT32")))


def _checked(n: Net, build: Callable[[], Any]) -> None:
    build()
    check(n.network)


def _cache_made(n: Net) -> Any:
    cache = n.exp(n.x(2, 4, 16, 8, dtype="HALF"))
    return n.append(cache, n.x(2, 4, 1, 8, dtype="HALF"), n.x(2, dtype="INT32"))


def _cache_hidden(n: Net) -> None:
    n.output(n.exp(_cache(n)))
    check(n.network)


def _cache_read_twice(n: Net) -> None:
    n.output(_cache(n), "cache.next")
    n.output(n.exp(n.network._inputs[0]))
    check(n.network)


def _twice_named(n: Net) -> None:
    n.output(n.exp(n.x(2)), "y")
    n.output(n.exp(n.network._inputs[0]), "y")
    check(n.network)


def _two_numbers_of_ranks(n: Net) -> None:
    n.output(n.exchange(n.exchange(n.x(2)), ranks=3, groups=(0, 1, 2)))
    check(n.network)


CODES = torch.tensor([[-127, 0, 3], [127, -5, 1]], dtype=torch.int8)


def _codes(
    n: Net,
    scales: tuple[float, ...] = (0.5, 2.0),
    dtype: torch.dtype = torch.int8,
    **how: Any,
) -> Any:
    """Codes with a scale for each row; a look at their shape is a look at the rules."""
    return n.dequantized(n.constant(CODES.to(dtype)), n.constant(torch.tensor(scales)), **how).shape


#: what is built -> what it says
RULES: dict[str, tuple[Build, str]] = {
    "elementwise types": (lambda n: n.sum(n.x(2), n.x(2, dtype="BF16")), "nothing is cast"),
    "elementwise int and float": (lambda n: n.sum(n.x(2), n.x(2, dtype="INT32")), "nothing is"),
    "elementwise int32 and int64": (
        lambda n: n.sum(n.x(2, dtype="INT64"), n.x(2, dtype="INT32")),
        "nothing is cast",
    ),
    "elementwise ranks": (lambda n: n.sum(n.x(2), n.x(1, 2)), "ranks must be equal"),
    "elementwise dims": (lambda n: n.sum(n.x(2, 3), n.x(2, 2)), "cannot be broadcast"),
    "logic of numbers": (
        lambda n: n.network.add_elementwise(n.x(2), n.x(2), n.trt.ElementWiseOperation.AND),
        "AND takes BOOL",
    ),
    "sum of bool": (lambda n: n.sum(n.x(2, dtype="BOOL"), n.x(2, dtype="BOOL")), "SUM takes"),
    "power of whole numbers": (
        lambda n: n.network.add_elementwise(
            n.x(2, dtype="INT32"), n.x(2, dtype="INT32"), n.trt.ElementWiseOperation.POW
        ),
        "POW takes",
    ),
    "unary of whole numbers": (lambda n: n.exp(n.x(2, dtype="INT32")), "EXP takes"),
    "activation of whole numbers": (
        lambda n: n.network.add_activation(n.x(2, dtype="INT64"), n.trt.ActivationType.TANH),
        "TANH takes",
    ),
    "matmul types": (lambda n: n.product(n.x(2, 3), n.x(3, 4, dtype="HALF")), "nothing is cast"),
    "matmul ranks": (lambda n: n.product(n.x(1, 2, 3), n.x(3, 4)), "ranks must be equal"),
    "matmul inside": (lambda n: n.product(n.x(2, 3), n.x(2, 3)), "3 times 2"),
    "matmul of whole numbers": (
        lambda n: n.product(n.x(2, 2, dtype="INT32"), n.x(2, 2, dtype="INT32")),
        "it takes",
    ),
    "matmul batches": (lambda n: n.product(n.x(2, 2, 2), n.x(3, 2, 2)), "cannot be broadcast"),
    "select types": (_select, "nothing is cast"),
    "select condition": (
        lambda n: n.network.add_select(n.x(2), n.x(2), n.x(2)),
        "a condition takes BOOL",
    ),
    "concat types": (lambda n: _concat(n, n.x(2), n.x(2, dtype="HALF")), "nothing is cast"),
    "concat dims": (lambda n: _concat(n, n.x(2, 3), n.x(2, 4)), "dim 1 differs"),
    "concat ranks": (lambda n: _concat(n, n.x(2, 3), n.x(2)), "ranks must be equal"),
    "concat axis": (lambda n: _concat(n, n.x(2), n.x(2), axis=1), "no axis 1"),
    "slice bounds": (lambda n: _slice(n, (0, 1), (4, 5), (1, 1)), "out of bounds"),
    "slice ranks": (lambda n: _slice(n, (0,), (4,), (1,)), r"are of axes \(0, 1\)"),
    "slice bounds of an axis": (
        lambda n: _slice(n, (1,), (5,), (1,), axes=(1,)),
        "5 from 1 by 1 are out of bounds",
    ),
    "slice axes": (lambda n: _slice(n, (0,), (1,), (1,), axes=(2,)), "different axes of it"),
    "slice axes twice": (
        lambda n: _slice(n, (0, 0), (1, 1), (1, 1), axes=(1, 1)),
        "different axes of it",
    ),
    "slice size from data": (
        lambda n: (
            (s := n.network.add_slice(n.x(4), (0,), (1,), (1,))).set_input(
                2, n.x(1, dtype="INT32")
            ),
            s.get_output(0).shape,
        ),
        "no shape tensor",
    ),
    "reshape twice unknown": (lambda n: n.reshape(n.x(6), -1, -1).shape, "at most one dim is -1"),
    "reshape volume": (lambda n: n.reshape(n.x(6), 4).shape, "volumes differ"),
    "reshape rest": (lambda n: n.reshape(n.x(2, 6), 0, 4, -1).shape, "volumes differ"),
    "transpose": (
        lambda n: (
            setattr(s := n.network.add_shuffle(n.x(2, 3)), "first_transpose", (0, 0)),
            s.get_output(0).shape,
        ),
        "is no permutation",
    ),
    "index type": (
        lambda n: n.network.add_gather(n.x(2), n.x(1), 0).get_output(0).shape,
        "an index takes",
    ),
    "gather axis": (
        lambda n: n.network.add_gather(n.x(2), n.x(1, dtype="INT32"), 1).get_output(0).shape,
        "no axis 1",
    ),
    "gather of unknown tuples": (
        lambda n: _gather_nd(n, n.x(2, 3, 4), n.x(2, -1, dtype="INT64"), 0),
        "known at build",
    ),
    "gather elementwise": (
        lambda n: _gather_nd(n, n.x(2, 3), n.x(2, 1, 1, dtype="INT64"), 1),
        "elementwise dims",
    ),
    "top-k of too many": (lambda n: _topk(n, n.x(2, 5000), 3841), "at most 3840"),
    "top-k of all": (lambda n: _topk(n, n.x(2, 3), 4), "k is 4"),
    "top-k axis": (lambda n: _topk(n, n.x(2, 2, 2, 2, 3), 1, axes=1), "of the last four"),
    "softmax axes": (
        lambda n: (
            setattr(s := n.network.add_softmax(n.x(2, 3)), "axes", 3),
            s.get_output(0).shape,
        ),
        "one axis",
    ),
    "reduce of bool": (
        lambda n: n.network.add_reduce(n.x(2, dtype="BOOL"), n.trt.ReduceOperation.SUM, 1, True),
        "SUM takes",
    ),
    "constant of bool": (
        lambda n: n.network.add_constant((1,), n.trt.Weights(n.trt.DataType.BOOL, 0, 1)),
        "BOOL: no constant has it",
    ),
    "weights count": (
        lambda n: n.network.add_constant((3,), n.trt.Weights(n.trt.DataType.HALF, 0, 2)),
        r"2 weights for \[3\]",
    ),
    "cast to FP8": (lambda n: n.network.add_cast(n.x(2), n.trt.DataType.FP8), "no cast to FP8"),
    "unsupported input": (lambda n: n.x(2, dtype="FP4"), "FP4 is not supported"),
    "input name": (lambda n: (n.x(2, name="a"), n.x(2, name="a")), "a name of its own"),
    "rank": (lambda n: n.x(*[1] * 9), "too many dims"),
    "rank of a result": (lambda n: n.reshape(n.x(1), *[1] * 9).shape, "more than 8 dims"),
    "attention heads": (
        lambda n: _masked(n, None, q=(2, -1, 3, 8)),
        "counts and sizes of heads are static",
    ),
    "attention groups": (lambda n: _masked(n, None, q=(2, 3, 3, 8)), "heads do not fit"),
    "attention head size": (lambda n: _masked(n, None, q=(2, 4, 3, 16)), "heads do not fit"),
    "attention types": (
        lambda n: (
            n.attention(n.x(1, 1, 1, 8), n.x(1, 1, 1, 8), n.x(1, 1, 1, 8, dtype="HALF"))
            .get_output(0)
            .shape
        ),
        "nothing is cast",
    ),
    "mask and causal kind": (
        lambda n: _masked(n, n.x(2, 1, 3, 5, dtype="BOOL"), "LOWER_RIGHT"),
        "exclude each other",
    ),
    "causal kind": (lambda n: _masked(n, None, "UPPER_LEFT"), "hides what lies before"),
    "causal": (
        lambda n: n.network.add_attention(
            n.x(1, 1, 1, 8),
            n.x(1, 1, 1, 8),
            n.x(1, 1, 1, 8),
            n.trt.AttentionNormalizationOp.SOFTMAX,
            True,
        ),
        "hides what lies before",
    ),
    "mask type": (lambda n: _masked(n, n.x(2, 1, 3, 5, dtype="HALF")), "a mask takes"),
    "mask rank": (lambda n: _masked(n, n.x(2, 3, 5, dtype="BOOL")), "a mask is"),
    "mask shape": (lambda n: _masked(n, n.x(2, 1, 1, 5, dtype="BOOL")), "a mask is"),
    "dequantised type": (lambda n: _codes(n, dtype=torch.int32), "takes FP8, INT8"),
    "dequantised by what is computed": (
        lambda n: n.dequantized(n.constant(CODES), n.exp(n.x(2))).shape,
        "not a constant",
    ),
    "dequantised to another type": (lambda n: _codes(n, to="HALF"), "has its type"),
    "scales of another axis": (lambda n: _codes(n, axis=1), "one for each entry of axis 1"),
    "scales of no axis": (lambda n: _codes(n, axis=2), "axis 2"),
    "a scale below zero": (lambda n: _codes(n, scales=(0.5, -2.0)), "positive"),
    "cache is an input": (_cache_made, "a cache is a network input"),
    "cache size": (lambda n: _cache(n, slots=-1), "S_max is static"),
    "cache type": (lambda n: _cache(n, dtype="INT32", update="INT32"), "a cache takes"),
    "cache and update": (lambda n: _cache(n, update="FLOAT"), "nothing is cast"),
    "cache heads": (lambda n: _cache(n, new=(2, 2, 3, 8)), "does not fit"),
    "cache room": (lambda n: _cache(n, new=(2, 4, 17, 8)), "does not fit"),
    "write indices": (lambda n: _cache(n, at="FLOAT"), "write_indices takes"),
    "cache is an output": (_cache_hidden, "its output is no output of the network"),
    "cache has one reader": (_cache_read_twice, "also reads"),
    "ranks of another layer": (
        lambda n: setattr(n.network.add_softmax(n.x(2, 3)), "num_ranks", 2),
        "runs on one rank",
    ),
    "exchange of one rank": (lambda n: n.exchange(n.x(2), ranks=1, groups=(0,)).shape, "two"),
    "other ranks": (
        lambda n: setattr(n.exchange(n.x(2))._layer, "num_ranks", 4),
        "2 and cannot be changed",
    ),
    "group of some ranks": (lambda n: n.exchange(n.x(2), ranks=4).shape, "all of 4 ranks"),
    "group of nobody": (lambda n: n.exchange(n.x(2), groups=()).shape, "all of 2 ranks"),
    "sum of a gathering": (lambda n: n.exchange(n.x(2), "ALL_GATHER").shape, "not NONE"),
    "no sum": (lambda n: n.exchange(n.x(2), reduce="NONE").shape, "NONE, not SUM"),
    "root of all": (lambda n: n.exchange(n.x(2), root=0).shape, "has no root"),
    "broadcast": (lambda n: n.exchange(n.x(2), "BROADCAST", "NONE").shape, "is not recorded"),
    "exchange of whole numbers": (lambda n: n.exchange(n.x(2, dtype="INT64")).shape, "takes BF16"),
    "gathering of a number": (lambda n: n.exchange(n.x(), "ALL_GATHER", "NONE").shape, "rank 1"),
    "several numbers of ranks": (_two_numbers_of_ranks, r"collectives of \[2, 3\] ranks"),
    "condition's rank": (
        lambda n: _conditional(n, lambda n: n.x(1), lambda n: n.x(1), n.x(1, dtype="BOOL")),
        "of rank 0",
    ),
    "condition's type": (
        lambda n: _conditional(n, lambda n: n.x(1), lambda n: n.x(1), n.x()),
        "takes BOOL",
    ),
    "branches' types": (
        lambda n: _conditional(n, lambda n: n.x(1), lambda n: n.x(1, dtype="HALF")),
        "nothing is",
    ),
    "branches' shapes": (
        lambda n: _conditional(n, lambda n: n.x(1), lambda n: n.x(2)),
        "one type and shape",
    ),
    "branch of int64": (
        lambda n: _conditional(n, lambda n: _entered(n, n.x(1, dtype="INT64")), lambda n: n.x(1)),
        "a branch takes",
    ),
    "branch reads from outside": (_outer_read, "did not come in as an input"),
    "outside reads from a branch": (_inner_read, r"reads \S.*, inside a conditional"),
    "branches share": (_shared_inside, "both branches hold"),
    "output without a name": (
        lambda n: _checked(n, lambda: n.network.mark_output(n.exp(n.x(2)))),
        "has a name",
    ),
    "outputs of one name": (_twice_named, "are called y"),
    "output twice": (
        lambda n: [n.network.mark_output(t) for t in [n.exp(n.x(2))] * 2],
        "an output already",
    ),
    "input as output": (lambda n: n.network.mark_output(n.x(2)), "cannot be an output"),
    "no output": (lambda n: _checked(n, lambda: n.x(2)), "has no output"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str) -> None:
    build, message = RULES[rule]
    with pytest.raises(RuleError, match=message):
        build(Net())


def test_typing_is_asked_for_before_11() -> None:
    for version, fails in (("10.16.1", True), ("11.4.0", False)):
        n = Net(version)
        n.network._flags = 0
        n.output(n.exp(n.x(2)))
        if fails:
            with pytest.raises(RuleError, match="STRONGLY_TYPED"):
                check(n.network)
        else:
            check(n.network)


def test_legal_forms() -> None:
    """What the rules must let through: int64 arithmetic, a mask of one head, dims not known."""
    n = Net()
    n.sum(n.x(-1, 3, dtype="INT64"), n.x(1, 3, dtype="INT64"))
    assert _masked(n, n.x(2, 1, 3, 5, dtype="BOOL")) == (2, 4, 3, 8)
    assert n.reshape(n.x(-1, -1, 6), 0, 0, 2, 3).shape == (-1, -1, 2, 3)
    assert n.reshape(n.x(-1, 4), -1).shape == (-1,)
    assert n.product(n.x(-1, -1, 4), n.x(1, 4, 2)).shape == (-1, -1, 2)
    _cache(n, at="INT64")


# --- the module -------------------------------------------------------------------------------


def test_versions_differ() -> None:
    old, new = recorder("10.16.1"), recorder("11.4.0")
    assert getattr(old.INetworkDefinition, "add_attention_v2", None) is None
    assert new.INetworkDefinition.add_attention_v2
    assert "CausalMaskKind" not in vars(old) and "CausalMaskKind" in vars(new)
    assert int(old.NetworkDefinitionCreationFlag.STRONGLY_TYPED) == 1
    assert int(new.NetworkDefinitionCreationFlag.STRONGLY_TYPED) == 0
    with pytest.raises(ValueError, match=r"one of 10\.16\.1, 11\.4\.0"):
        recorder("9.0")
    assert VERSIONS == ("10.16.1", "11.4.0")


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
    assert list(n.trt.calls[-4].kwargs or ()) == ["input"]
    assert n.trt.calls[-3].args == (2,)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda n: n.network.add_softmax(),
        lambda n: n.network.add_softmax(n.x(2), 3),
        lambda n: n.network.add_softmax(tensor=n.x(2)),
        lambda n: n.network.add_softmax(torch.zeros(2)),
        lambda n: n.network.add_unary(n.x(2), n.trt.ActivationType.TANH),
        lambda n: n.network.add_reduce(n.x(2), n.trt.ReduceOperation.SUM, 1, 1),
        lambda n: setattr(n.network.add_softmax(n.x(2)), "axes", "0"),
        lambda n: n.trt.Weights(torch.float32, 0, 1),
    ],
)
def test_arguments_are_checked(wrong: Build) -> None:
    with pytest.raises(TypeError):
        wrong(Net())


def test_read_only() -> None:
    with pytest.raises(AttributeError):
        Net().x(2).dtype = 1


# --- what layers mean -------------------------------------------------------------------------


def run(n: Net, tensor: Any, **feeds: torch.Tensor) -> torch.Tensor:
    n.output(tensor)
    return execute(n.network, feeds)["y"]


def test_bf16_is_rounded_once() -> None:
    n = Net()
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = run(n, n.exp(n.x(-1, dtype="BF16")), x0=x)
    assert got.dtype == torch.bfloat16 and torch.equal(got, x.float().exp().bfloat16())


def test_dequantised_codes() -> None:
    """By one scale, or by one for each entry of an axis."""
    n = Net()
    codes = n.constant(CODES)
    n.output(n.dequantized(codes, n.constant(torch.tensor([0.5, 2.0]))), "rows")
    n.output(n.dequantized(codes, n.constant(torch.tensor([1.0, 2.0, 3.0])), axis=-1), "columns")
    n.output(n.dequantized(codes, n.constant(torch.tensor(0.25))), "all")
    check(n.network)
    got = execute(n.network, {})
    assert got["rows"].tolist() == [[-63.5, 0, 1.5], [254, -10, 2]]
    assert got["columns"].tolist() == [[-127, 0, 9], [127, -10, 3]]
    assert torch.equal(got["all"], CODES * 0.25)


def test_traffic() -> None:
    """A product reads what it needs of its weights through other layers; an update writes what is
    new, and reads no cache; a part of a constant may be all that is read."""
    n = Net()
    x, w = n.x(1, 4), n.constant(torch.zeros(6, 8))
    n.network.get_layer(0).name = "w/weights"
    half = n.network.add_slice(w, (0, 0), (4, 8), (1, 1)).get_output(0)
    n.output(n.exp(n.product(n.exp(x), half)))
    read, written = (4 + 4 * 8) * 4 + 8 * 4, 8 * 4
    assert traffic(n.network, {}, {}) == (read + written + 8 * 4, 2)
    assert traffic(n.network, {}, {"w": 0.5})[0] == read + written + 8 * 4 - 8 * 4
    n = Net()
    cache, new, at = n.x(1, 2, 10, 4), n.x(1, 2, 3, 4), n.x(1, dtype="INT32")
    mode = n.trt.KVCacheMode.LINEAR
    n.output(n.network.add_kv_cache_update(cache, new, at, mode).get_output(0))
    assert traffic(n.network, {}, {}) == (2 * 24 * 4 + 4, 1)


def test_slices_that_wrap() -> None:
    """What lies beyond the end lies at the start, in that mode alone; other modes are not here."""
    n = Net()
    layer = n.network.add_slice(n.x(4, 5), (3,), (5,), (1,))
    layer.axes, layer.mode = (1,), n.trt.SampleMode.WRAP
    n.output(layer.get_output(0))
    x = torch.arange(20.0).view(4, 5)
    assert torch.equal(execute(n.network, {"x0": x})["y"], x.roll(-3, 1))
    layer.mode = n.trt.SampleMode.CLAMP
    with pytest.raises(RuleError, match="modes but STRICT_BOUNDS and WRAP"):
        check(n.network)


def test_cache_update_is_in_place() -> None:
    n = Net()
    out = _cache(n)
    n.output(out, "next")
    cache, new = torch.zeros(2, 4, 16, 8).half(), torch.ones(2, 4, 3, 8).half()
    feeds = {"x0": cache, "x1": new, "x2": torch.tensor([0, 13], dtype=torch.int32)}
    assert execute(n.network, feeds)["next"].data_ptr() == cache.data_ptr()
    assert cache[0, :, :3].eq(1).all() and cache[1, :, 13:].eq(1).all() and cache.sum() == 192
    assert aliases(n.network) == {"next": "x0"}
    feeds["x2"] = torch.tensor([0, 14], dtype=torch.int32)
    with pytest.raises(RuleError, match="14 to 17"):
        execute(n.network, feeds)


def test_gather_with_a_shared_dim() -> None:
    n = Net()
    layer = n.network.add_gather_v2(n.x(2, 3, 4), n.x(2, 2, 1, dtype="INT64"), n.trt.GatherMode.ND)
    layer.num_elementwise_dims = 1
    x, index = torch.randn(2, 3, 4), torch.tensor([[[0], [2]], [[1], [1]]])
    got = run(n, layer.get_output(0), x0=x, x1=index)
    assert torch.equal(got, torch.stack([x[0, [0, 2]], x[1, [1, 1]]]))


def test_slice_that_repeats() -> None:
    n = Net()
    got = run(
        n,
        n.network.add_slice(n.x(1, 2), (0, 0), (3, 2), (0, 1)).get_output(0),
        x0=torch.tensor([[5.0, 6.0]]),
    )
    assert got.tolist() == [[5, 6]] * 3


def test_slice_of_some_axes() -> None:
    n = Net()
    layer = n.network.add_slice(n.x(-1, 4, 5), (3, 1), (2, 2), (1, 2))
    layer.axes = (2, 1)
    assert layer.get_output(0).shape == (-1, 2, 2)
    x = torch.arange(40).view(2, 4, 5).float()
    assert torch.equal(run(n, layer.get_output(0), x0=x), x[:, 1::2, 3:])


def test_shape_tensors_are_followed() -> None:
    """A slice whose size is partly another tensor's: what is known stays known."""
    n = Net()
    x, like = n.x(2, 8, 4), n.x(-1)
    first = n.network.add_slice(n.network.add_shape(x).get_output(0), (0,), (1,), (1,))
    last = n.constant(torch.tensor([4]))
    parts = [first.get_output(0), n.network.add_shape(like).get_output(0), last]
    size = n.network.add_concatenation(parts)
    size.axis = 0
    layer = n.network.add_slice(x, (0, 0, 0), (1, 1, 1), (1, 1, 1))
    layer.set_input(2, size.get_output(0))
    assert layer.get_output(0).shape == (2, -1, 4)
    assert run(n, layer.get_output(0), x0=torch.zeros(2, 8, 4), x1=torch.zeros(5)).shape[1] == 5
    with pytest.raises(RuleError, match="9 from 0"):
        execute(n.network, {"x0": torch.zeros(2, 8, 4), "x1": torch.zeros(9)})
    assert max(volumes(n.network, {"x1": (8,)}).values()) == 64


def test_branches_are_lazy() -> None:
    """The side that is not asked for is not computed: here it could not be."""
    n = Net()
    x, at = n.x(4), n.x(1, dtype="INT32")

    def then(n: Net) -> Any:
        return n.network.add_gather(_entered(n, x), _entered(n, at), 0).get_output(0)

    def other(n: Net) -> Any:
        return n.network.add_slice(_entered(n, x), (0,), (1,), (1,)).get_output(0)

    n.output(_conditional(n, then, other))
    feeds = {"x0": torch.arange(4.0), "x1": torch.tensor([7], dtype=torch.int32)}
    no, yes = ({**feeds, "x2": torch.tensor(b)} for b in (False, True))
    assert execute(n.network, no)["y"].tolist() == [0]
    with pytest.raises(RuleError, match="index outside of 4"):
        execute(n.network, yes)


def test_bytes_that_are_there_at_a_time() -> None:
    """Of tensors between layers; a view is no copy, inputs, outputs and constants lie elsewhere."""
    n = Net()
    x = n.x(-1, 4)
    first = n.exp(n.exp(x))
    view = n.network.add_shuffle(first)
    view.reshape_dims = (4, -1)
    second = n.exp(view.get_output(0))
    n.output(n.exp(second))
    assert sizes(n.network, {"x0": (100, 4)})[1] == 2 * 100 * 4 * 4


def test_constants_of_a_conditional() -> None:
    """Big ones would be copied at each step."""
    n = Net()
    x = n.x(512, 1024)
    big = n.constant(torch.zeros(512, 1024))
    with pytest.raises(RuleError, match="2097152 bytes of constants are copied at each step"):
        _conditional(n, lambda n: _entered(n, big), lambda n: _entered(n, x))


def test_attention() -> None:
    n = Net()
    layer = n.attention(n.x(1, 4, 3, 8), n.x(1, 2, 5, 8), n.x(1, 2, 5, 8))
    layer.mask = n.x(1, 1, 3, 5, dtype="BOOL")
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    mask = torch.ones(3, 5).tril(2).bool()[None, None]
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, scale=1.0, enable_gqa=True
    )
    got = run(n, layer.get_output(0), x0=q, x1=k, x2=v, x3=mask)
    assert torch.allclose(got, want, atol=1e-5)


def test_lower_right_is_the_causal_mask() -> None:
    n = Net()
    layer = n.attention(n.x(1, 1, 3, 8), n.x(1, 1, 5, 8), n.x(1, 1, 5, 8), "LOWER_RIGHT")
    q, k, v = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)
    mask = torch.ones(3, 5).tril(2).bool()[None, None]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=1.0)
    assert torch.allclose(run(n, layer.get_output(0), x0=q, x1=k, x2=v), want, atol=1e-5)


def test_weights_are_read_where_they_lie() -> None:
    n = Net()
    w = torch.ones(2)
    tensor = n.constant(w)
    w.fill_(3)
    assert run(n, tensor).tolist() == [3, 3]


def test_absent_weights_cannot_run() -> None:
    n = Net()
    weights = n.trt.Weights(n.trt.DataType.FLOAT, 0, 2)
    with pytest.raises(RuleError, match="without memory"):
        run(n, n.network.add_constant((2,), weights).get_output(0))


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "x0 was not fed"),
        ({"x0": torch.zeros(3)}, r"x0: FLOAT\[2\]: found"),
        ({"x0": torch.zeros(2).half()}, "found torch.float16"),
        ({"x0": torch.zeros(2), "z": torch.zeros(2)}, "fed z"),
    ],
)
def test_feeds_are_checked(feeds: dict[str, torch.Tensor], message: str) -> None:
    n = Net()
    n.output(n.exp(n.x(2)))
    with pytest.raises(RuleError, match=message):
        execute(n.network, feeds)


def test_dims_of_one_name_are_equal() -> None:
    n = Net()
    for tensor in (n.x(-1), n.x(-1)):
        tensor.set_dimension_name(0, "B")
    n.output(n.sum(*n.network._inputs))
    with pytest.raises(RuleError, match="B is 1, elsewhere 3"):
        execute(n.network, {"x0": torch.zeros(3), "x1": torch.zeros(1)})
