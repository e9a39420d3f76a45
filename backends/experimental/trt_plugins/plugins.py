"""The project's Triton kernels as TensorRT plugins that are compiled ahead of time.

A plugin layer holds PTX, a grid in terms of the inputs' sizes and nothing else: an engine with
such layers needs neither Python nor triton. They serve what TensorRT has no kernels for on Hopper:
the experts of a mixture, decode attention with heads of 512, and the norms between two blocks, two
dozen layers of its own. They have one form for every number of tokens: a step with a conditional
could not be recorded. Kernels are compiled while the network is written, where an error can still
name the layer; the builder's callbacks find them made.

TensorRT passes a kernel the pointers of its inputs, 32-bit whole numbers, and the pointers of its
outputs. It gives it no scratch memory, and zeroes nothing.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import GenericAlias
from typing import Any

from g4ir.errors import LowerError, MissingError
from g4ir.ir.graph import Node
from g4ir.ops.types import Type
from g4ir.plan.engine_limits import Limits

from ...primitives import attention as plain
from ...primitives.emitter import Operand
from ...primitives.moe import own_choices
from ...primitives.network import SLOTS, Lowering, Network, is_ring
from ...torch_compile.kernels.assembly import require_triton
from ...torch_compile.tunings import find_tuning
from ...trt.emitter import TrtEmitter
from ...trt.probe import data_type
from ...trt.recorder import SHARED_BYTES
from .ptx import WITHOUT, Kernel, compile_kernel
from .table import NORMS, PLUGINS, Named, Plan, Plugin, Shapes

NAMESPACE = "g4ir"
#: plugin -> most of some constants, and of stages, with which 16-bit kernels keep to SHARED_BYTES
TIGHT: Mapping[str, tuple[Mapping[str, int], int]] = {
    "moe_gate_up_grouped": ({"BLOCK_K": 32}, 3),
    "moe_down_grouped": ({"BLOCK_K": 32}, 3),
    "decode_parts": ({"N": 16}, 1),
}
#: whose tunings count
GPU = "h100"

_POINTERS = {"bf16": "*bf16", "f16": "*fp16", "f32": "*fp32", "i32": "*i32", "whole": "i32"}


# --- registration -----------------------------------------------------------------------------


def plugin_module(trt: Any) -> Any:
    """Return `tensorrt.plugin` of a module."""
    module = getattr(trt, "plugin", None)
    return importlib.import_module(f"{trt.__name__}.plugin") if module is None else module


def register_plugins(trt: Any) -> None:
    """Make every plugin known to TensorRT, once; its creator follows with the first layer."""
    trtp = plugin_module(trt)
    known = getattr(trtp.op, NAMESPACE, None)
    for plugin in PLUGINS.values():
        if getattr(known, plugin.name, None) is None:
            name = f"{NAMESPACE}::{plugin.name}"
            trtp.register(name, lazy_register=True)(_descriptor(trt, trtp, plugin))
            trtp.aot_impl(name)(_implementation(trt, trtp, plugin))


def _descriptor(trt: Any, trtp: Any, plugin: Plugin) -> Callable[..., Any]:
    def describe(*inputs: Any, plan: str) -> Any:
        made = Plan.parse(plan)
        kinds = plugin.kinds(made.dtype)[-len(plugin.outputs) :]
        shapes = plugin.shapes(trtp, _expressions(plugin, inputs), made.constants)
        return tuple(
            trtp.from_shape_expr(tuple(shape), data_type(trt, kind))
            for shape, kind in zip(shapes, kinds, strict=True)
        )

    _sign(describe, {**_tensors(trtp, plugin), "plan": str}, _outputs(trtp, plugin))
    return describe


def _implementation(trt: Any, trtp: Any, plugin: Plugin) -> Callable[..., Any]:
    """Return the function (descriptors of the inputs, plan, those of the outputs, tactic) ->
    kernel, PTX, launch, whole numbers"""

    def implement(*given: Any) -> Any:
        made, inputs = Plan.parse(given[-3]), given[:-3]
        kernel = compiled(made)
        shapes = _expressions(plugin, inputs)
        launch = trtp.KernelLaunchParams()
        grid = plugin.grid(trtp, shapes, made.constants)
        for axis, size in zip("xyz", grid):
            setattr(launch, f"grid_{axis}", size)
        launch.block_x, launch.shared_mem = kernel.warps * 32, kernel.shared
        whole = trtp.SymIntExprs(len(plugin.whole))
        for i, number in enumerate(plugin.whole.values()):
            whole[i] = trtp.SymInt32(number(shapes, made.constants))
        return kernel.name, kernel.ptx, launch, whole

    rest = {"plan": str, "outputs": _outputs(trtp, plugin), "tactic": int}
    results = GenericAlias(tuple, (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))
    _sign(implement, {**_tensors(trtp, plugin), **rest}, results)
    return implement


def _tensors(trtp: Any, plugin: Plugin) -> dict[str, Any]:
    return dict.fromkeys(plugin.inputs, trtp.TensorDesc)


def _outputs(trtp: Any, plugin: Plugin) -> Any:
    return GenericAlias(tuple, (trtp.TensorDesc,) * len(plugin.outputs))


def _sign(f: Any, given: Mapping[str, Any], result: Any) -> None:
    """Give a function the signature off which TensorRT reads the number and kinds of arguments."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    f.__signature__ = inspect.Signature(
        [inspect.Parameter(n, kind, annotation=a) for n, a in given.items()],
        return_annotation=result,
    )


def _expressions(plugin: Plugin, inputs: Sequence[Any]) -> Shapes:
    return {n: tuple(x.shape_expr) for n, x in zip(plugin.inputs, inputs, strict=True)}


# --- compilation ------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _compiled(text: str) -> Kernel:
    plan = Plan.parse(text)
    kernel = kernel_of(PLUGINS[plan.plugin])
    constants = dict(plan.constants)
    if "STAGES" in kernel.arg_names:
        constants["STAGES"] = plan.stages
    kinds = [_POINTERS[k] for k in PLUGINS[plan.plugin].kinds(plan.dtype)]
    return compile_kernel(kernel, kinds, constants, plan.warps, plan.stages, plan.capability)


def compiled(plan: Plan) -> Kernel:
    """Return the kernel of a plan; layers of equal plans share it. MissingError without triton,
    LowerError if it cannot compile the kernel."""
    try:
        return _compiled(plan.text())
    except (LowerError, MissingError) as e:
        raise type(e)(f"{e}; or build without plugins: {WITHOUT}") from e


def kernel_of(plugin: Plugin) -> Any:
    """Return the kernel of a plugin; MissingError without triton."""
    require_triton()
    module = importlib.import_module(f"{__package__}.{plugin.module}")
    return getattr(module, plugin.name)


def tightened(plan: Plan, shared: int) -> Plan:
    """Return the plan with smaller tiles where `shared` bytes are no more than a launch has."""
    most, stages = TIGHT.get(plan.plugin, ({}, plan.stages))
    if shared > SHARED_BYTES:
        return plan
    constants = {k: min(v, most[k]) if k in most else v for k, v in plan.constants.items()}
    return replace(plan, constants=constants, stages=min(plan.stages, stages))


def fitted(plan: Plan, layer: str, shared: int = SHARED_BYTES) -> Plan:
    """Return the plan with tiles and stages, at most its own, that fit `shared` bytes.

    LowerError where there is no room for one stage.
    """
    plan = tightened(plan, shared)
    while compiled(plan).shared > shared:
        if plan.stages == 1:
            raise LowerError(
                f"plugin {plan.plugin} of {layer} needs {compiled(plan).shared} bytes of shared "
                f"memory, of which a launch may ask for {shared}: build without plugins, "
                f"{WITHOUT}"
            )
        plan = replace(plan, stages=plan.stages - 1)
    return plan


def add_plugin(e: TrtEmitter, plan: Plan, *inputs: Operand) -> tuple[Operand, ...]:
    """Add a plugin layer; return its results. LowerError where the kernel does not fit the GPU, or
    TensorRT refuses the layer."""
    plugin, layer = PLUGINS[plan.plugin], f"{e.scope}/{plan.plugin}"
    types = dict(zip(plugin.inputs, (x.type for x in inputs), strict=True))
    wanted = plugin.kinds(plan.dtype)[: len(inputs)]
    if [t.dtype for t in types.values()] != wanted:
        given = ", ".join(map(str, types.values()))
        raise LowerError(f"plugin {layer}: {given}; expected {', '.join(wanted)}")
    plan = fitted(plan, layer, e.shared)
    e.shared_used = max(e.shared_used, compiled(plan).shared)
    register_plugins(e.trt)
    creator = getattr(getattr(plugin_module(e.trt).op, NAMESPACE), plan.plugin)
    create = creator(*map(e.tensor, inputs), plan=plan.text())
    made = e.named(e.network.add_plugin(create, True), plan.plugin)
    return tuple(e.checked(made, t, i) for i, t in enumerate(result_types(plan, types)))


def _emitter(net: Network) -> TrtEmitter:
    assert isinstance(net.e, TrtEmitter)
    return net.e


def result_types(plan: Plan, inputs: Mapping[str, Type]) -> list[Type]:
    plugin = PLUGINS[plan.plugin]
    shapes = plugin.shapes(Named(), {n: t.shape for n, t in inputs.items()}, plan.constants)
    kinds = plugin.kinds(plan.dtype)[-len(shapes) :]
    return [Type(kind, tuple(shape)) for kind, shape in zip(kinds, shapes, strict=True)]


# --- experts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """Sizes of a layer's experts, and of the chunks that they are built for."""

    dtype: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    act: str
    tokens: int

    def sizes(self, *names: str) -> dict[str, Any]:
        known = {
            "HIDDEN": self.hidden,
            "INNER": self.inner,
            "EXPERTS": self.experts,
            "TOP_K": self.top_k,
            "ACT": self.act,
            "E_P": _power_of_2(self.experts),
        }
        return {n: known[n] for n in names}

    def plans(self) -> tuple[Plan, Plan, Plan, Plan]:
        """Return the plans of sort, gate and up, down, weighted sum: sorted by expert."""
        block, warps, stages = self._tile()
        wide = {**block, "BLOCK_N": 2 * block["BLOCK_N"]}
        tiles = self.sizes("HIDDEN", "INNER", "EXPERTS", "E_P")
        return (
            Plan("moe_sort", self.dtype, {**self.sizes("EXPERTS"), "BLOCK": 1024}, 4, 1),
            Plan(
                "moe_gate_up_grouped",
                self.dtype,
                {**tiles, **self.sizes("TOP_K", "ACT"), **block},
                warps,
                stages,
            ),
            Plan("moe_down_grouped", self.dtype, {**tiles, **wide}, warps, stages),
            Plan("moe_combine", self.dtype, {**self.sizes("HIDDEN", "TOP_K"), "BLOCK": 256}, 1, 1),
        )

    def _tile(self) -> tuple[dict[str, int], int, int]:
        """Return block sizes, warps, stages. A tile has room for twice the slots of an average
        expert, so that few experts need a second one; fp32 has no tensor cores to feed."""
        if self.dtype == "f32":
            return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32}, 4, 2
        average = self.tokens * self.top_k / self.experts
        rows = min(128, max(16, _power_of_2(math.ceil(2 * average))))
        warps, stages = (8, 3) if rows == 128 else (4, 4)
        return {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 64}, warps, stages


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def experts(
    net: Network,
    n: Node,
    x: Operand,
    weights: Operand,
    index: Operand,
    gate_up: Operand,
    down: Operand,
    first: Operand | None = None,
) -> Operand:
    """Lower experts, sorted by expert, whatever the number of tokens: a step with a conditional,
    which could choose another form for single tokens, cannot be recorded."""
    if first is not None:
        weights, index = own_choices(net.e, weights, index, first, int(gate_up.shape[0]))
    e = _emitter(net)
    sort, ups, downs, combine = experts_of(n, net.limits).plans()
    listed = add_plugin(e, sort, e.cast(index, "i32"))
    (act,) = add_plugin(e, ups, x, *listed, gate_up)
    (parts,) = add_plugin(e, downs, act, *listed, down)
    return add_plugin(e, combine, parts, weights)[0]


def experts_of(n: Node, limits: Limits) -> Experts:
    count, double, hidden = map(int, n["gate_up"].type.shape)
    return Experts(
        n["x"].type.dtype,
        hidden,
        double // 2,
        count,
        int(n["index"].type.shape[-1]),
        n.word("act"),
        limits.max_batch * limits.prefill_chunk,
    )


# --- norms ------------------------------------------------------------------------------------

_BY_FORM = {form: name for name, form in NORMS.items()}


def norms(net: Network, n: Node, *operands: Operand) -> tuple[Operand, ...]:
    """Lower the end of a block and the norms behind it to one kernel; layers where there is none of
    this form."""
    plan = norm_plan_of(n)
    return add_plugin(_emitter(net), plan, *operands) if plan else tuple(net.expanded(n))


def norm_plan_of(n: Node) -> Plan | None:
    """Return the plan of an end of a block; None if there is no kernel of its form."""
    form = n.op, bool(n.attrs["scaled"]), tuple(map(bool, n.wholes("weighted")))
    x = n.inputs[0].type
    return norm_plan(form, x, n.number("eps")) if form in _BY_FORM and x.rank == 3 else None


def norm_plan(form: tuple[str, bool, tuple[bool, ...]], x: Type, eps: float) -> Plan:
    """Return the plan of a form of NORMS for rows like x."""
    d = int(x.shape[-1])
    constants = {"EPS": eps, "D": d, "BLOCK": _power_of_2(d)}
    warps = find_tuning(form[0], GPU, {"d": d}).use["warps"]
    return Plan(_BY_FORM[form], x.dtype, constants, warps, 1)


# --- attention --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decode:
    """Sizes of an attention over a full-length cache."""

    dtype: str
    rows: int
    heads: int
    group: int
    d: int
    slots: int
    window: int
    scale: float
    softcap: float

    def plans(self, shared: int = SHARED_BYTES) -> tuple[Plan, Plan]:
        """Return the plans of the shares and of their sum, which counts in the same blocks."""
        shape = {
            "d": self.d,
            "kv_heads": self.heads,
            "group": self.group,
            "window": self.window,
            "programs": self.rows * self.heads,
        }
        use = find_tuning("decode_attention", GPU, shape).use
        both = {
            "HEADS": self.heads,
            "GROUP": self.group,
            "D": self.d,
            "SLOTS": self.slots,
            "WINDOW": self.window,
            "N": use["block_n"],
            "SPLITS": use["splits"],
        }
        inner, outer = self._factors()
        own = {
            "INNER": inner,
            "OUTER": outer,
            "CAPPED": self.softcap > 0,
            "M": max(16, _power_of_2(self.group)),
            "DP": max(16, _power_of_2(self.d)),
        }
        plan = Plan("decode_parts", self.dtype, both | own, use["warps"], use["stages"])
        first = tightened(plan, shared)
        both |= {"N": first.constants["N"], "BLOCK": math.gcd(self.d, 64)}
        return first, Plan("decode_merge", self.dtype, both, 4, 4)

    def _factors(self) -> tuple[float, float]:
        """Return (inner, outer): base 2 scores are inner * x; capped, outer * tanh(inner * x)."""
        if self.softcap:
            return self.scale / self.softcap, self.softcap * math.log2(math.e)
        return self.scale * math.log2(math.e), 0.0


def attention(
    net: Network,
    n: Node,
    q: Operand,
    positions: Operand,
    written: Operand,
    *held: Operand,
    form: Callable[..., Operand] | None = None,
) -> Operand:
    """Attend over full-length caches by the decode kernels; by `form` over rings, and, noted, where
    the kernels do not fit."""
    e = _emitter(net)
    if is_ring(n.caches[0].type) or len(held) != 2:
        return plain.attention(net, n, q, positions, written, *held, form=form)
    plans = decode_of(net, n, q, held[0]).plans(e.shared)
    try:
        fitted(plans[0], str(n.out), e.shared)
    except LowerError as reason:
        e.notes.append(f"{n.out}: explicit attention, since {str(reason).partition(':')[0]}")
        return plain.attention(net, n, q, positions, written, *held, form=form)
    at = net.shared(("i32", n["positions"]), lambda: e.cast(positions, "i32"))
    slots = net.shared(("i32", SLOTS), lambda: e.cast(net.env[SLOTS], "i32"))
    parts, stats = add_plugin(e, plans[0], q, *held, at, slots)
    return add_plugin(e, plans[1], parts, stats, at, slots)[0]


def attention_latent(
    net: Network, n: Node, *operands: Operand, form: Callable[..., Operand] | None = None
) -> Operand:
    """Attend by `form`, and say so in the notes."""
    _emitter(net).notes.append(
        f"{n.out}: explicit attention, since the decode kernels read K and V, not the form "
        f"{n.word('form')} of latent_kv"
    )
    return plain.attention_latent(net, n, *operands, form=form)


def decode_of(net: Network, n: Node, q: Operand, keys: Operand) -> Decode:
    _, heads, slots, d = (x if isinstance(x, int) else 0 for x in keys.shape)
    whole = q.shape[2]
    assert isinstance(whole, int)
    return Decode(
        q.dtype,
        net.limits.max_batch,
        heads,
        whole // heads,
        d,
        slots,
        n.whole("window"),
        n.number("scale"),
        n.number("softcap"),
    )


#: op -> (network, node, *operands) -> results, in the place of primitives/lowerings.py's
ATTENTION: Mapping[str, Lowering] = {
    "attention": attention,
    "attention_latent": attention_latent,
}
#: as ATTENTION
BLOCK_ENDS: Mapping[str, Lowering] = {op: norms for op, *_ in NORMS.values()}
