"""What is emitted in the dialect, computed by onnxruntime on a CPU: ONNX's operators take the place
of NVIDIA's. Networks of several ranks run in threads of one process: cut at their collectives, each
part by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, TypeVar

import onnx
import onnxruntime
import torch
from onnx import helper

from g4ir.backends.base import Tensors
from g4ir.backends.onnx_graph.runtime import PRODUCTS_OF_CODES, SEVERITY
from g4ir.backends.trt.dialect import COLLECTIVE, Dialect
from g4ir.backends.trt.parse import Addresses

T = TypeVar("T")
#: this rank's tensor -> those of all ranks, in order
Exchange = Callable[[torch.Tensor], Sequence[torch.Tensor]]
#: seconds that a rank waits for the others
PATIENCE_S = 600.0


def with_weights(e: Dialect, name: str) -> onnx.ModelProto:
    """Return the model of what was emitted, with the weights that it points to in it."""
    model = e.model(name, "", {})
    for t in model.graph.initializer:
        if t.data_location == onnx.TensorProto.EXTERNAL:
            stored = e.storage.of(t).view(-1).view(torch.uint8)
            t.ClearField("external_data")
            t.data_location, t.raw_data = onnx.TensorProto.DEFAULT, stored.numpy().tobytes()
    return model


def as_onnx(n: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return nodes of ONNX that compute what one of NVIDIA's does."""
    if n.op_type == "TRT_Slice":
        x, start, size, stride = n.input
        stop = f"{n.name}/stop"
        add = helper.make_node("Add", [start, size], [stop])
        return [add, helper.make_node("Slice", [x, start, stop, "", stride], n.output)]
    if n.op_type == "TRT_Attention":
        q, keys, values, mask = n.input
        rows, one, shape, whole = (f"{n.name}/{x}" for x in ("rows", "one", "shape", "mask"))
        return [  # onnxruntime takes no mask that is the same for all queries
            helper.make_node("Shape", [q], [rows], start=2, end=3),
            helper.make_node("Constant", [], [one], value_ints=[1]),
            helper.make_node("Concat", [one, one, rows, one], [shape], axis=0),
            helper.make_node("Expand", [mask, shape], [whole]),
            helper.make_node("Attention", [q, keys, values, whole], n.output, scale=1.0),
        ]
    return [n]


def new_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Return a session on one thread, in which sums are those of fp32."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, SEVERITY
    for key, value in PRODUCTS_OF_CODES.items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def side_by_side(ranks: int, work: Callable[[int, Exchange], T]) -> list[T]:
    """Call `work(rank, exchange)` in a thread for each rank; return what they return. An error of
    one ends the others where they wait for it, and is raised here."""
    if ranks == 1:
        return [work(0, lambda x: [x])]
    shown: dict[int, torch.Tensor] = {}
    meeting = threading.Barrier(ranks, timeout=PATIENCE_S)

    def exchange(rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        shown[rank] = x.clone()
        meeting.wait()
        found = [shown[i] for i in range(ranks)]
        meeting.wait()  # before anybody shows something else
        return found

    def run(rank: int) -> T:
        try:
            return work(rank, partial(exchange, rank))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        started = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [e for f in started if (e := f.exception())]
    first = (e for e in errors if not isinstance(e, threading.BrokenBarrierError))
    if errors:
        raise next(first, errors[0])
    return [f.result() for f in started]


@dataclass(frozen=True)
class Segment:
    """The part of a network up to a collective, and the collective, if one follows."""

    session: onnxruntime.InferenceSession
    collective: onnx.NodeProto | None


def segments(model: onnx.ModelProto) -> Iterator[Segment]:
    """Cut a network behind what each collective exchanges."""
    g, nodes = model.graph, [m for n in model.graph.node for m in as_onnx(n)]
    kinds = {v.name: v for v in (*g.input, *g.output, *g.value_info)}
    numbers = accumulate((n.op_type == COLLECTIVE for n in nodes), initial=0)
    parts: dict[int, list[onnx.NodeProto]] = {}
    for number, n in zip(numbers, nodes, strict=False):
        parts.setdefault(number, []).append(n)
    for number, part in sorted(parts.items()):
        last = part.pop() if part[-1].op_type == COLLECTIVE else None
        written = {name for n in part for name in n.output}
        read = {name for n in part for name in n.input if name}
        later = {i for k, p in parts.items() if k > number for n in p for i in n.input}
        later |= {v.name for v in g.output} | ({last.input[0]} if last else set())
        weights = [t for t in g.initializer if t.name in read]
        inputs = read - written - {t.name for t in weights}
        values = ([kinds[n] for n in sorted(names)] for names in (inputs, written & later))
        piece = helper.make_model(
            helper.make_graph(part, f"{g.name}{number}", *values, weights),
            opset_imports=model.opset_import,
            ir_version=model.ir_version,
        )
        yield Segment(new_session(piece), last)


def computed(parts: Sequence[Segment], feeds: Tensors, exchange: Exchange | None) -> Tensors:
    """Return every tensor that is fed, or handed from a segment to another or to the caller."""
    values = {name: t.contiguous().numpy() for name, t in feeds.items()}
    for part in parts:
        names = [o.name for o in part.session.get_outputs()]
        given = {i.name: values[i.name] for i in part.session.get_inputs()}
        values |= zip(names, part.session.run(names, given), strict=True)
        if part.collective:
            assert exchange, "no ranks are linked"
            own = torch.from_numpy(values[part.collective.input[0]])
            rows = [t.float() for t in exchange(own)]
            how = {a.name: helper.get_attribute_value(a) for a in part.collective.attribute}
            summed = how["collective_operation"] == b"all_reduce"
            joined = torch.stack(rows).sum(0) if summed else torch.cat(rows)
            values[part.collective.output[0]] = joined.to(own.dtype).numpy()
    return {name: torch.from_numpy(v) for name, v in values.items()}


def new_emitter(weights: Callable[[str], torch.Tensor] | None = None) -> Dialect:
    params: Any = SimpleNamespace(tensor=weights)
    return Dialect(Addresses(params))


def outputs_of(
    e: Dialect, feeds: Mapping[str, torch.Tensor], exchange: Exchange | None = None
) -> dict[str, torch.Tensor]:
    """The outputs; feeds that it has no input for are left out."""
    made = computed([*segments(with_weights(e, "network"))], feeds, exchange)
    return {name: made[name] for name in e.results}
