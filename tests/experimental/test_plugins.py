"""Plugins up to the builder: PTX with the parameters that TensorRT passes, launches, descriptors in
NVIDIA's own Python, errors, and whole models whose networks hold plugin layers.

What the kernels compute is tested in interpreted/.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from g4ir.backends.experimental.trt_plugins import plugins, trial
from g4ir.backends.experimental.trt_plugins import ptx as compiler
from g4ir.backends.experimental.trt_plugins.plugins import Decode, Experts
from g4ir.backends.experimental.trt_plugins.reference import run as meaning
from g4ir.backends.experimental.trt_plugins.table import NORMS, PLUGINS, Plan
from g4ir.backends.torch_compile.kernels.resources import assembled
from g4ir.backends.trt.build import write_network
from g4ir.backends.trt.dry_run import emulator
from g4ir.backends.trt.forms import SETTINGS
from g4ir.backends.trt.probe import DTYPES, MOST_SHARED_BYTES
from g4ir.backends.trt.recorder import SHARED_BYTES, recorder
from g4ir.backends.trt.recorder.plugin import Instance, plugin_module
from g4ir.errors import LowerError, MissingError
from g4ir.ops.moe import experts
from g4ir.ops.types import Type, torch_dtype
from g4ir.plan.engine_limits import Limits
from g4ir.spec.record import load_spec
from tests.configs import spec_called
from tests.engines import BUDGET
from tests.experimental.plugin_bindings import RealLayer, grid_of, real_plugins
from tests.network_session import NetworkSession
from tests.oracle import find_oracle, random_tokens, relative
from tests.recorder.bindings import WHEELS
from tests.runner import built_program, open_session
from tests.trt import running
from tests.trt.running import prepared

ROOT = Path(__file__).parents[3]
SLOTS = 4096 + 512


# ---- kernels of the models -----------------------------------------------------------------------


def experts_of_26b(dtype: str, chunk: int = 512) -> Experts:
    text = load_spec("26b-a4b").text
    assert text.moe
    return Experts(
        dtype,
        text.hidden_size,
        text.moe.intermediate_size,
        text.moe.num_experts,
        text.moe.top_k_experts,
        text.hidden_activation,
        chunk,
    )


def decode_of(variant: str, dtype: str) -> Decode:
    text = load_spec(variant).text
    kv = text.full.num_key_value_heads
    group = text.num_attention_heads // kv
    return Decode(dtype, 1, kv, group, text.full.head_dim, SLOTS, 0, 1.0, 0.0)


def plans(dtype: str, shared: int = SHARED_BYTES) -> dict[str, Plan]:
    """Of the variants that plugins are for, within these bytes of shared memory. Heads of 512 in
    fp32 have no room."""
    sizes = experts_of_26b(dtype)
    found = {p.plugin: p for p in sizes.plans()}
    for variant in ("26b-a4b", "31b", "e2b") if dtype != "f32" else ():
        for p in decode_of(variant, dtype).plans(shared):
            found[f"{p.plugin} {variant}"] = p
    if dtype != "f32":
        for chunk in (64, 2048):
            for p in experts_of_26b(dtype, chunk).plans()[1:3]:
                found[f"{p.plugin} chunk {chunk}"] = p
    for variant in ("31b", "26b-a4b", "e2b") if dtype != "f32" else ():
        row = Type(dtype, (1, 1, load_spec(variant).text.hidden_size))
        for name, form in NORMS.items():
            found[f"{name} {variant}"] = plugins.norm_plan(form, row, 1e-6)
    return {name: plugins.fitted(p, name, shared) for name, p in found.items()}


def shapes_of(plan: Plan, rows: int = 1, tokens: int = 1, slots: int = 1000) -> list[Any]:
    """(dtype, dims) of a plugin's inputs."""
    c = {"HIDDEN": 0, "INNER": 0, "TOP_K": 8, **plan.constants}
    lead = rows, tokens
    heads, d = c.get("HEADS", 0), c.get("D", 0)
    cache = rows, heads, c.get("SLOTS", 0), d
    splits = *lead, heads, -(-c.get("SPLITS", 0) // tokens)
    known = {
        "x": (*lead, c["HIDDEN"]),
        "index": (*lead, c["TOP_K"]),
        "order": (*lead, c["TOP_K"]),
        "weights": (*lead, c["TOP_K"]),
        "act": (*lead, c["TOP_K"], c["INNER"]),
        "gate_up": (c.get("EXPERTS"), 2 * c["INNER"], c["HIDDEN"]),
        "down": (c.get("EXPERTS"), c["HIDDEN"], c["INNER"]),
        "offsets": (c.get("EXPERTS", 0) + 1,),
        "q": (*lead, heads * c.get("GROUP", 0), d),
        "keys": cache,
        "values": cache,
        "positions": lead,
        "slots": (slots,),
        "parts": (*splits, c.get("GROUP"), d),
        "stats": (*splits, 2, c.get("GROUP")),
    }
    if plan.plugin in NORMS:
        known |= dict.fromkeys(("x", "a", "b", "residual"), (*lead, d))
        known |= dict.fromkeys(("w", "w_a", "w_b", "w1", "w2"), (d,)) | {"scalar": (1,)}
    if plan.plugin == "moe_combine":
        known["parts"] = (*lead, c["TOP_K"], c["HIDDEN"])
    plugin = PLUGINS[plan.plugin]
    kinds = plugin.kinds(plan.dtype)
    return [(kind, known[name]) for name, kind in zip(plugin.inputs, kinds)]


@pytest.mark.parametrize(
    ("dtype", "shared"),
    [
        ("bf16", SHARED_BYTES),
        ("f32", SHARED_BYTES),
        *(
            pytest.param(*c, marks=pytest.mark.full)
            for c in (
                ("f16", SHARED_BYTES),
                ("bf16", MOST_SHARED_BYTES),
                ("f16", MOST_SHARED_BYTES),
            )
        ),
    ],
)
def test_kernels_fit_the_gpu(dtype: str, shared: int) -> None:
    """Compiled for sm_90 at the sizes of the models: no spills, shared memory in its limits, that
    of every launch and what a block has, and a product of many rows uses tensor cores."""
    for name, plan in plans(dtype, shared).items():
        kernel = plugins.compiled(plan)
        registers, spilled = assembled(kernel.ptx, 90)
        assert spilled == 0 and registers <= 255, name
        assert kernel.shared <= shared, name
        assert ".target sm_90a" in kernel.ptx and ".version 8.7\n" in kernel.ptx
        if "grouped" in name and dtype != "f32":
            assert "wgmma.mma_async" in kernel.ptx, name


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_parameters_are_what_tensorrt_passes(dtype: str) -> None:
    """Pointers of the inputs, whole numbers, pointers of the outputs; the kernel's own names are
    in the order of the plugin's."""
    for name, plan in plans(dtype).items():
        plugin = PLUGINS[plan.plugin]
        given = [*plugin.inputs, *plugin.whole, *plugin.outputs]
        assert plugins.kernel_of(plugin).arg_names[: len(given)] == given, name
        pointer, whole = ("u64", True), ("u32", False)
        expected = [whole if n in plugin.whole else pointer for n in given]
        found = compiler.parameters(plugins.compiled(plan).ptx)
        assert [(p.type, p.pointer) for p in found] == expected, name


#: what names source files (by a path of any machine: triton keeps what it compiled before)
OF_SOURCES = re.compile(r"\.(file|loc)\b|debug_")


def test_triton_adds_parameters_which_are_taken_off() -> None:
    """Else there would be nothing to take off, and `trimmed` could go."""
    seen = []
    plan = experts_of_26b("bf16").plans()[0]
    real = compiler.trimmed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "trimmed", lambda p, n: seen.append((p, n)) or real(p, n))
        plugins._compiled.__wrapped__(plan.text())
    text, count = seen[0]
    assert len(compiler.parameters(text)) > count
    assert OF_SOURCES.search(text) and not OF_SOURCES.search(real(text, count))


def test_ptx_says_nothing_of_this_machine() -> None:
    for plan in plans("bf16").values():
        text = plugins.compiled(plan).ptx
        assert not OF_SOURCES.search(text) and str(ROOT) not in text


ENTRY = """\
.visible .entry k(
\t.param .u64 .ptr .global .align 1 k_param_0,
\t.param .u32 k_param_1,
\t.param .u64 .ptr .global .align 1 k_param_2
)
.reqntid 128
{
\tld.param.b64 \t%%rd1, [k_param_0];
\tld.param.b32 \t%%r1, [k_param_1];
%s}
"""


def test_scratch_memory_that_is_used_is_refused() -> None:
    assert [p.name for p in compiler.parameters(compiler.trimmed(ENTRY % "", 2))] == [
        "k_param_0",
        "k_param_1",
    ]
    with pytest.raises(LowerError, match=r"kernel k needs memory of its own \(k_param_2\)"):
        compiler.trimmed(ENTRY % "\tld.param.b64 \t%rd2, [k_param_2];\n", 2)
    with pytest.raises(LowerError, match="3 parameters, of which a plugin passes 4"):
        compiler.trimmed(ENTRY % "", 4)
    with pytest.raises(LowerError, match="0 entries"):
        compiler.trimmed("", 1)


def test_a_kernel_without_room_names_its_layer() -> None:
    """Where there is room for less it takes fewer stages first, and smaller tiles where a launch
    has what every launch has."""
    plan = decode_of("31b", "bf16").plans(MOST_SHARED_BYTES)[0]
    assert plugins.fitted(plan, "L5", 96 * 1024).stages < plan.stages
    assert plugins.fitted(plan, "L5").constants["N"] < plan.constants["N"]
    with pytest.raises(LowerError, match=r"plugin decode_parts of L5\.attn needs \d+ bytes"):
        plugins.fitted(plan, "L5.attn", shared=16 * 1024)


def without_triton(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "triton", None)


def with_another_triton(patch: pytest.MonkeyPatch) -> None:
    """One that does not compile these kernels."""

    def compiled(*args: Any, **options: Any) -> None:
        raise RuntimeError("a pass of the compiler failed")

    patch.setattr(triton, "compile", compiled)


BROKEN = {
    without_triton: (MissingError, r"pip install triton.*build without plugins: --set"),
    with_another_triton: (
        LowerError,
        r"triton [\d.]+ cannot compile kernel \w+ for sm_90: RuntimeError: a pass .*--set",
    ),
}


@pytest.fixture(params=[pytest.param(b, id=b.__name__) for b in BROKEN])
def broken(request: pytest.FixtureRequest) -> Iterator[Any]:
    plugins._compiled.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        request.param(patch)
        yield BROKEN[request.param]


def test_kernels_that_cannot_be_compiled(broken: Any) -> None:
    error, message = broken
    for plan in (experts_of_26b("bf16").plans()[0], decode_of("31b", "bf16").plans()[1]):
        with pytest.raises(error, match=message):
            plugins.compiled(plan)


def test_plugins_are_asked_for_by_name(broken: Any) -> None:
    """`auto` means layers, also where no kernel can be compiled; a plugin by name is an error."""
    error, message = broken
    graph = prepared(built_program(spec_called("26b-a4b-small"), latent_kv="off"))
    settings = {name: s.default for name, s in SETTINGS.items()}
    api, limits = emulator(), Limits(1, 64, 9)
    made = write_network(api, graph, limits, None, settings)
    assert (made.settings["experts"], made.settings["norms"]) == ("all", "layers")
    assert not made.emitter.notes and not made.emitter.shared_used
    for name in ("experts", "norms"):
        with pytest.raises(error, match=message):
            write_network(api, graph, limits, None, {**settings, name: "plugin"})


# ---- launches ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["recorder", *WHEELS])
def trt(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Our own stand-in for `tensorrt.plugin`, and the real one of each version."""
    if request.param == "recorder":
        yield SimpleNamespace(DataType=recorder().DataType, plugin=plugin_module())
    else:
        with real_plugins(request.param, tmp_path_factory.mktemp("wheel")) as module:
            yield module


def layer_of(trt: Any, plan: Plan) -> Any:
    plugins.register_plugins(trt)
    count = len(PLUGINS[plan.plugin].inputs)
    if isinstance(trt, SimpleNamespace):
        tensor = type("ITensor", (), {})
        create = getattr(trt.plugin.op.g4ir, plan.plugin)(
            *(tensor() for _ in range(count)), plan=plan.text()
        )
        return create()[2]
    return RealLayer(trt, plan.plugin, plan.text(), count)


LAUNCHES = [(1, 1, 1), (1, 300, 1000), (3, 7, 4096)]


def test_launches(trt: Any) -> None:
    """Through the registration: types and shapes of the outputs, grid, block, shared memory, whole
    numbers, and the kernel."""
    for plan in plans("bf16").values():
        layer, plugin = layer_of(trt, plan), PLUGINS[plan.plugin]
        for rows, tokens, slots in LAUNCHES:
            inputs = shapes_of(plan, rows, tokens, slots)
            given = [(getattr(trt.DataType, DTYPES[kind]), dims) for kind, dims in inputs]
            types = {n: Type(*t) for n, t in zip(plugin.inputs, inputs)}
            results = plugins.result_types(plan, types)
            made = layer.output_types(given)
            assert [d for _, d in made] == [t.shape for t in results], plan
            assert [t.name for t, _ in made] == [DTYPES[t.dtype] for t in results], plan
            launch = layer.launch(given)
            kernel = plugins.compiled(plan)
            grid = grid_of(plan, {n: t.shape for n, t in types.items()})
            x, y, z = (*grid, 1, 1)[:3]
            assert launch.params == {
                "grid_x": x,
                "grid_y": y,
                "grid_z": z,
                "block_x": kernel.warps * 32,
                "block_y": 1,
                "block_z": 1,
                "shared_mem": kernel.shared,
            }, plan
            assert y < 2**16 and z < 2**16
            known = {"looked_at": slots, "tokens": tokens, "count": rows * tokens * 8}
            assert launch.whole == [known[n] for n in plugin.whole]
            assert (launch.name, launch.ptx) == (kernel.name, kernel.ptx)


def test_tiles_suffice() -> None:
    """However slots are spread over experts, there is a program for each tile."""
    plan = experts_of_26b("bf16").plans()[1]
    block, g = plan.constants["BLOCK_M"], torch.Generator().manual_seed(0)
    for tokens in (1, 5, 64, 512):
        tiles = grid_of(plan, {"x": (1, tokens, 2816), "order": (1, tokens, 8)})[0]
        for favourites in (8, 9, 128):
            scores = torch.rand(tokens, favourites, generator=g)
            counts = scores.topk(8, -1).indices.flatten().bincount()
            assert int((-(-counts // block)).sum()) <= tiles


def test_more_shared_memory_where_a_trial_build_shows_it() -> None:
    """A network of one kernel alone is built and run: refused, wrong, and right."""
    api = emulator()
    assert trial.shared_memory(api, "cpu") == SHARED_BYTES
    api.trt._shared_memory = MOST_SHARED_BYTES
    assert trial.shared_memory(api, "cpu") == MOST_SHARED_BYTES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Instance, "run", lambda self, *t: [x + 1 for x in meaning(plan_of(self), *t)])
        assert trial.shared_memory(api, "cpu") == SHARED_BYTES


def plan_of(instance: Instance) -> Plan:
    return Plan.parse(instance.attributes["plan"])


# ---- what they mean ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_plugins_together_are_the_op(dtype: str) -> None:
    """Their meaning in torch is what the op's reference is, but for the order of sums."""
    g = torch.Generator().manual_seed(0)
    sizes = Experts(dtype, 40, 24, 9, 3, "gelu_pytorch_tanh", 14)
    x = torch.randn(2, 7, 40, generator=g).to(torch_dtype(dtype))
    gate_up = (torch.randn(9, 48, 40, generator=g) / 6).to(x.dtype)
    down = (torch.randn(9, 40, 24, generator=g) / 5).to(x.dtype)
    weights = torch.rand(2, 7, 3, generator=g)
    index = torch.rand(2, 7, 9, generator=g).argsort(-1)[..., :3].int()
    sort, first, second, combine = sizes.plans()
    listed = meaning(sort, index)
    parts = meaning(second, *meaning(first, x, *listed, gate_up), *listed, down)
    got = meaning(combine, *parts, weights)[0]
    want: Any = experts.reference(x, weights, index.long(), gate_up, down, act=sizes.act)
    assert relative(got, want).max() < (1e-6 if dtype == "f32" else 4e-3)


# ---- networks ------------------------------------------------------------------------------------


def plugin_session(
    name: str, batch: int, chunk: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[NetworkSession, list[str]]:
    """A model as a recorded network with plugins, and the plugins that its last step ran."""
    session, _ = running.recorded_session(
        find_oracle(spec_called(name)),
        batch,
        chunk,
        all_logits=False,
        attention="plugin",
        norms="plugin",
        **options,
    )
    ran: list[str] = []
    real, step = Instance.run, session.made

    def noted(self: Instance, *tensors: torch.Tensor) -> Any:
        ran.append(self.of.plugin_id.removeprefix("g4ir::"))
        return real(self, *tensors)

    def run(feeds: Any) -> Any:
        ran.clear()
        return step(feeds)

    monkeypatch.setattr(Instance, "run", noted)
    session.made = run
    return session, ran


EXPERTS = {"moe_sort", "moe_gate_up_grouped", "moe_down_grouped", "moe_combine"}
DECODE = {"decode_parts", "decode_merge"}


@pytest.mark.parametrize(
    "name",
    [
        "26b-a4b-small",
        pytest.param("31b-small", marks=pytest.mark.full),
        pytest.param("e2b-small", marks=pytest.mark.full),
    ],
)
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged prefill in chunks, then decode: as the interpreter, by the same kernels."""
    oracle = find_oracle(spec_called(name))
    layers = oracle.spec.text.num_hidden_layers if oracle.spec.text.moe else 0
    tokens, lengths = random_tokens(oracle.spec, 3, 26), torch.tensor([26, 0, 21])
    want = open_session(oracle, 3, 11, latent_kv="off")
    got, ran = plugin_session(name, 3, 11, monkeypatch)
    agree(got.prefill(tokens, lengths), want.prefill(tokens, lengths), [0, 2])
    assert set(ran) - {*NORMS} == (EXPERTS | DECODE if layers else DECODE)
    once = Counter(ran)
    assert not layers or all(once[n] == layers for n in EXPERTS)
    assert sum(once[n] for n in NORMS) >= 2 * oracle.spec.text.num_hidden_layers
    for step in tokens.t()[:2]:
        agree(got.decode(step), want.decode(step))
        assert Counter(ran) == once


def test_latent_caches_are_left_alone() -> None:
    program = built_program(find_oracle(spec_called("26b-a4b-small")).spec, latent_kv="value")
    made = running.emit(prepared(program), Limits(1, 64, 9), None, attention="plugin")
    assert len(made.emitter.notes) == 2 and "the form value of latent_kv" in made.emitter.notes[0]


def agree(got: torch.Tensor, want: torch.Tensor, rows: Any = slice(None)) -> None:
    """Within the budget of fp32 engines."""
    assert relative(got, want)[rows].max() < BUDGET


def test_full_length_caches_behind_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no pass planned rings: a decode step's every attention is a plugin's."""
    oracle = find_oracle(spec_called("26b-a4b-small"))
    tokens = random_tokens(oracle.spec, 2, 20)
    want = open_session(oracle, 2, 20, skip=("plan_cache",), latent_kv="off")
    got, ran = plugin_session("26b-a4b-small", 2, 20, monkeypatch, skip=("plan_cache",))
    agree(got.prefill(tokens), want.prefill(tokens))
    agree(got.decode(tokens[:, 0]), want.decode(tokens[:, 0]))
    assert {ran.count(name) for name in DECODE} == {oracle.spec.text.num_hidden_layers}
