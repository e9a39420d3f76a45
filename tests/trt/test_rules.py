"""The recorder's rules beside NVIDIA's builder: what one refuses, so does the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from g4ir.backends.trt import build
from g4ir.errors import MissingError
from tests.recorder.networks import Net
from tests.recorder.test_recorder import OTHER_RULES, RULES, TABLE, TAKEN, written
from tests.trt.compiled import real

try:
    TRT = real().trt
except MissingError as e:
    pytest.skip(f"TensorRT-RTX is not installed: {e}", allow_module_level=True)


def refused_by_library(make: Callable[[Net], Any]) -> str:
    """What TensorRT-RTX says against a network; nothing where it compiles it."""
    log = build.logger(TRT)
    builder = TRT.Builder(log)
    net = Net(module=TRT, network=builder.create_network(0))
    try:
        made = make(net)
        if net.network.num_outputs == 0 and isinstance(made, TRT.ITensor):
            tuple(made.shape)
            net.output(made)
    except (
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
    ) as e:  # no layer, or one without a shape
        return log.said() if log.errors else str(e)
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for i in range(net.network.num_inputs):
        x = net.network.get_input(i)
        ranges = ([n if d == -1 else d for d in x.shape] for n in (2, 4, 4))
        if -1 in tuple(x.shape):
            profile.set_shape(x.name, *ranges)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(net.network, config)
    return "" if plan is not None and not log.errors else log.said()


#: what the library takes all the same, and why the recorder does not
OTHERWISE = {
    "has its type": "scales of another type than the result: documented as one",
    r"collectives of \[2, 3\] ranks": "a run has one number of ranks",
    "has a name": "the library makes names up, by which no engine can be used",
}


@pytest.mark.parametrize("text", RULES)
def test_rules(text: str) -> None:
    assert refused_by_library(lambda n: written(n, text))


def test_other_rules() -> None:
    taken = {said for make, said in OTHER_RULES if not refused_by_library(make)}
    assert taken == OTHERWISE.keys()


@pytest.mark.parametrize("text", [*TAKEN, *TABLE["refused here"]])
def test_legal_forms(text: str) -> None:
    assert not refused_by_library(lambda n: written(n, text))
