"""`--backend onnx`: exported models against transformers, and as files of their own.

The decomposition that is proven here on onnxruntime is the one that TensorRT is given.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper

from g4ir.backends.base import GraphRun
from g4ir.backends.onnx_graph import export
from g4ir.backends.onnx_graph.emitter import OnnxEmitter
from g4ir.backends.onnx_graph.runtime import open_session
from g4ir.backends.primitives.graph import network_graph
from g4ir.backends.primitives.lowerings import LOWERINGS, OUTSIDE
from g4ir.check.passes import verify_each_pass
from g4ir.cli import main
from g4ir.engine.engine import Engine
from g4ir.errors import EngineError, LowerError
from g4ir.ops import OPS
from g4ir.passes import PASSES
from g4ir.weights.tensorfile import read_header
from tests.cases import TABLES
from tests.configs import VARIANTS, short, spec_called
from tests.engines import some_tokens
from tests.network_session import check_op, in_network
from tests.oracle import relative
from tests.test_numerics import BUDGET, logits_of
from tests.test_ops import IN_NETWORKS

#: of an op, relative to the result's largest value
OP_BUDGET = 2e-6


# --- engines ----------------------------------------------------------------------------------


#: what the contract's engines do not have (tests/contract/test_onnx.py): spec, options of its build
OPTIONS: dict[str, list[Any]] = TABLES["onnx options"]


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, tmp_path: Path) -> None:
    """As the reference, in chunks."""
    name, options = OPTIONS[option]
    options = {"dtype": "float32", "max_seq": 64, "prefill_chunk": 7, "max_batch": 5, **options}
    options["skip"] = PASSES if options.get("skip") == "all" else options.get("skip", ())
    want, got = (
        logits_of(spec_called(name), tmp_path / backend, {**options, "backend": backend})
        for backend in ("reference", "onnx")
    )
    assert relative(got, want).max() < BUDGET


# --- sessions ---------------------------------------------------------------------------------


def test_each_pass_looks_at_no_slot_behind_the_last_token(engines: Any) -> None:
    """Where a chunk's padding lies in a full cache, until the next chunk is written."""
    assert verify_each_pass(engines("onnx", "tiny-ple"), [*range(5, 17)]).ok


@pytest.fixture
def small(engines: Any) -> Engine:
    """Rows of per-layer embeddings, rings, shared caches; three rows."""
    return engines("onnx", "tiny-ple")


def test_caches_are_written_in_place(small: Engine) -> None:
    """A step costs what it reads, however long the caches are; no ring has a second buffer."""
    state = small.session(2).state
    model = onnx.load(str(small.path / export.MODEL), load_external_data=False)
    facts = {p.key: p.value for p in model.metadata_props}
    assert {*facts["g4ir.in_place"].split(",")} == state.caches.keys() > state.rings > {"L0.k"}
    assert all(state.caches[n] is state.spare[n] for n in state.caches)


@pytest.mark.parametrize("count", [21, 71])
def test_caches_show_by_position(small: Engine, engines: Any, count: int) -> None:
    """What a session of the reference backend holds, also of rings that were turned."""
    reference = engines("reference", "tiny-ple")
    ours, theirs = small.session(2), reference.session(2)
    tokens = some_tokens(2, count)
    for session in (ours, theirs):
        session.prefill(tokens)
    assert bool(ours.state.turned.any()) == (count > 32)
    seen, wanted = ours.state.tensors, theirs.state.views(count)
    assert seen.keys() == wanted.keys() and not ours.state.turned.any()
    for name, want in wanted.items():
        held = torch.arange(max(count - len(want), 0), count)
        error = seen[name][held % len(seen[name])] - want[held % len(want)]
        assert error.abs().max() < 1e-4, name


# --- the files --------------------------------------------------------------------------------


def models(folder: Path) -> dict[str, onnx.ModelProto]:
    files = (export.MODEL, export.EMBED)
    return {n: onnx.load(str(folder / n), load_external_data=False) for n in files}


def test_weights_stay_in_the_safetensors_files(small: Engine) -> None:
    """Every initialiser of any size is a tensor of theirs, where that file says it is."""
    headers = map(read_header, small.path.glob("*.safetensors"))
    entries = {k: (h.path.name, e) for h in headers for k, e in h.entries.items()}
    used = set()
    for model in models(small.path).values():
        assert model.ByteSize() < 1 << 20
        for t in model.graph.initializer:
            if t.data_location != onnx.TensorProto.EXTERNAL:
                assert len(t.raw_data) <= 4096
                continue
            place = {e.key: e.value for e in t.external_data}
            if place["location"] == export.CONSTANTS:
                continue
            name = t.name.split("[")[0]
            file, at = entries[name]
            assert place == {"location": file, "offset": str(at.start), "length": str(at.nbytes)}
            used.add(name)
    assert used == set(entries)


def test_files_say_what_they_take(small: Engine) -> None:
    for name, model in models(small.path).items():
        assert model.doc_string and model.graph.doc_string
        for v in (*model.graph.input, *model.graph.output):
            kind = v.name.split(".")[-1] if v.name.startswith("L") else v.name
            told = {"k": "NAME", "v": "NAME", "next": "NAME.next"}.get(kind, kind)
            assert f" {told} " in model.doc_string, f"{name}: {v.name}"


def test_tensors_have_the_names_of_values(small: Engine) -> None:
    made = {o for n in models(small.path)[export.MODEL].graph.node for o in n.output}
    values = {v.name for n in network_graph(small.program).nodes for v in n.outputs}
    # A scaling by one, or a row that another value is, makes no tensor of its own.
    assert len(values - made) < 0.1 * len(values)
    assert {f"L{i}.out" for i in range(8)} <= made


# --- at full size ----------------------------------------------------------------------------


def test_a_wrong_type_is_found(tmp_path: Path, small: Engine) -> None:
    """onnx infers the shapes of a written model again."""
    shutil.copytree(small.path, tmp_path / "engine")
    path = tmp_path / "engine" / export.MODEL
    model = onnx.load(str(path), load_external_data=False)
    v = next(v for v in model.graph.value_info if v.name == "L1.attn.qkv")
    v.type.tensor_type.shape.dim[2].dim_value += 1
    path.write_bytes(model.SerializeToString())
    with pytest.raises(LowerError, match=r"model\.onnx is no valid model"):
        export._check_file(path)


# --- ops --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in IN_NETWORKS if in_network(c)])
def test_ops(tmp_path: Path, case: tuple[str, int]) -> None:
    """Every op alone, on its samples, as its reference computes it."""
    with open(tmp_path / export.CONSTANTS, "wb") as file:
        e = OnnxEmitter(export.Directory(tmp_path, file))

        def outputs_of(_: OnnxEmitter, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            file.flush()
            model, path = e.model("op", case[0], {}), tmp_path / export.MODEL
            path.write_bytes(model.SerializeToString())
            export._check_file(path)
            fed = {i.name: feeds[i.name].numpy() for i in model.graph.input}
            made = open_session(path).run(None, fed)
            return {v.name: torch.from_numpy(x) for v, x in zip(model.graph.output, made)}

        check_op(case, e, LOWERINGS, outputs_of, OP_BUDGET)


# --- the command line -------------------------------------------------------------------------


@pytest.mark.parametrize("name", short("26b-a4b", of=VARIANTS))
def test_dry_run_counts_nodes(name: str, capsys: Any) -> None:
    words = f"build --variant {name} --backend onnx --dry-run --json --memory 2TiB --out engines/x"
    code = main([*words.split(), "--drafter", "default"])
    told = json.loads(capsys.readouterr().out)
    assert code == bool(told["short"]), "a disk may be too small"
    assert told["dtype"] == "float32" and " nodes: " in told["onnx"]
    assert {"vision_70", "vision_280"} <= told["towers"].keys()
    assert told["draft"].endswith(" nodes")


# --- bad input --------------------------------------------------------------------------------


def test_a_model_that_onnxruntime_refuses(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    x, y = (helper.make_tensor_value_info(n, 1, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Exp", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)])
    model.opset_import[0].version = 999
    path.write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match=r"model\.onnx: onnxruntime .* does not take it"):
        open_session(path)


def test_a_step_that_fails(small: Engine) -> None:
    session = small.session(1)
    feeds = small.embed_tokens(torch.tensor([[3, 4]])) | {
        "positions": torch.tensor([[1000, 1001]]),
        "lengths": torch.tensor([2]),
    }
    with pytest.raises(EngineError, match="failed in a prefill chunk of 1 x 2 tokens"):
        small.runtime.run(GraphRun("prefill", feeds, 2), session.state)


def test_every_op_is_lowered_or_expands() -> None:
    """An op without both would fail a build."""
    whole = {name for name, op in OPS.items() if op.expand is None}
    assert whole <= LOWERINGS.keys() | OUTSIDE <= OPS.keys()
