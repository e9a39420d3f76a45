"""One cache instead of two where K = V: decode time against context, and accuracy.

    python bench/latent.py [--contexts 2048,...] [--dtypes bf16,f32] [--rounds 5] [--save]

One layer of head dim 512 with 8 query heads per KV head; three engines, with the caches plain,
`value` and `raw`, in one process and interleaved A-B-C-A-B-C. The caches are filled with the keys
and values of one random projection, so that all three say the same; the rest of a step (embedding,
small MLP, head) is the same in all and is timed at a context of one token. Accuracy: logits over a
long text through the interpreter, in fp32 and bf16, against float64.

--save writes bench/results/latent.txt, and from the times the table that `--latent-kv auto` reads.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import save

import g4ir
from g4ir.bench.measure import interleave
from g4ir.bench.stats import Stat, median, stat
from g4ir.ir.interpret import empty_state, interpret
from g4ir.model.names import checkpoint_name
from g4ir.model.text import build_program
from g4ir.ops import OPS
from g4ir.ops.rope import rotated_pairs
from g4ir.ops.types import torch_dtype
from g4ir.passes import PassOptions, run_program
from g4ir.passes.latent_kv import FORMS, LatentOptions
from g4ir.plan.latent import LatentMeasurement, read_table, write_table
from g4ir.spec.record import Spec, load_spec
from g4ir.ui.table import aligned
from g4ir.weights.random import RandomCheckpoint

BUILD = Path("build/bench/latent")
CONTEXTS = "2048,4096,8192,16384,32768,65536"
SHAPE = "one layer, head dim 512, 128 rotated, 8 query heads, 1 KV head, 1 row"
SPEC = """\
schema: 1
model_type: gemma4
dtype: bf16
text:
  vocab_size: 256
  hidden_size: 256
  intermediate_size: 256
  num_hidden_layers: {layers}
  num_attention_heads: 8
  pattern: [{pattern}]
  sliding:
    head_dim: 64
    num_key_value_heads: 2
    window: 64
    rope: {{kind: default, theta: 10000.0}}
  full:
    head_dim: 512
    num_key_value_heads: 1
    k_eq_v: true
    rope: {{kind: proportional, theta: 1000000.0, rotary_fraction: 0.25}}
  max_position_embeddings: 262144
  final_logit_softcapping: 30.0
tokens: {{bos: 2, eos: [1], pad: 0}}
"""


def spec_file(name: str, *pattern: str) -> Spec:
    """Write a spec of these layers to a file of its own; return it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    path = BUILD / f"{name}.yaml"
    path.write_text(SPEC.format(layers=len(pattern), pattern=", ".join(pattern)))
    return load_spec(path)


# --- decode time ------------------------------------------------------------------------------


@dataclass
class Bench:
    """Sessions of one dtype, by form, whose caches hold the same keys and values."""

    spec: Spec
    dtype: str
    contexts: tuple[int, ...]
    steps: int

    def __post_init__(self) -> None:
        room = max(*self.contexts, 64)
        self.sessions: dict[str, Any] = {}
        for form in FORMS:
            out = BUILD / f"{self.dtype}-{form}"
            shutil.rmtree(out, ignore_errors=True)
            engine = g4ir.build(
                self.spec,
                out,
                random_weights=0,
                dtype=self.dtype,
                max_seq=room,
                prefill_chunk=16,
                latent_kv=form,
                progress=print,
            )
            self.sessions[form] = engine.session()
        self._fill()

    def _fill(self) -> None:
        """Fill in pieces, so that the projection in fp32 is never held whole."""
        dtype, kind = torch_dtype(self.dtype), self.spec.text.full
        source = RandomCheckpoint(self.spec, 0, dtype)
        weight = source.tensor(checkpoint_name("L0.attn.norm_k"))
        slots = next(iter(self.sessions["off"].state.tensors.values())).shape[0]
        for start in range(0, slots, 4096):
            at = torch.arange(start, min(start + 4096, slots))
            g = torch.Generator().manual_seed(start)
            raw = torch.randn(len(at), 1, kind.num_key_value_heads, kind.head_dim, generator=g)
            for name, rows in _rows(self.spec, raw.to(dtype), weight, at[:, None]).items():
                for session in self.sessions.values():
                    if name in session.state.tensors:
                        session.state.tensors[name][at] = rows

    def step(self, form: str, context: int) -> torch.Tensor:
        """Return the logits of one token after `context` of them."""
        session = self.sessions[form]
        session.length.fill_(context - 1)
        out: torch.Tensor = session.decode(torch.tensor([5]))
        return out

    def time(self, form: str, context: int) -> list[float]:
        """Measure seconds of each of `steps` decode steps, the last of which has this context."""
        session, token, times = self.sessions[form], torch.tensor([5]), []
        session.length.fill_(max(0, context - self.steps))
        for _ in range(self.steps):
            start = time.perf_counter()
            session.decode(token)
            times.append(time.perf_counter() - start)
        return times


def _rows(
    spec: Spec, raw: torch.Tensor, w: torch.Tensor, at: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the layer's state by name, in every form, of projections [T,1,n,d] at [T,1]."""
    full, eps = spec.text.full, spec.text.rms_norm_eps
    rope, dtype = full.rope, {torch.float32: "f32", torch.bfloat16: "bf16"}[raw.dtype]

    def run(op: str, *tensors: torch.Tensor, **attrs: Any) -> Any:
        reference = OPS[op].reference
        assert reference
        return reference(*tensors, **attrs)

    cos, sin = run(
        "rope_table",
        at,
        kind=rope.kind,
        theta=rope.theta,
        dim=full.head_dim,
        fraction=rope.rotary_fraction,
        factor=rope.factor or 1.0,
        dtype=dtype,
    )
    k = run("rope", run("rms_norm", raw, w, eps=eps), cos, sin)
    v = run("rms_norm", raw, eps=eps)
    pairs = rotated_pairs(rope.kind, full.head_dim, rope.rotary_fraction)
    return {
        "L0.k": k,
        "L0.v": v,
        "L0.raw": raw,
        "L0.rms": run("inverse_rms", raw, eps=eps),
        "L0.latent": run("latent_row", v, k, pairs=pairs),
    }


def decode_rows(bench: Bench, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each context: time, bytes and agreement of each form."""
    rest = {form: median(bench.time(form, 1)) * 1e3 for form in FORMS}
    for context in bench.contexts:
        plain = bench.step("off", context)
        agreement = {f: _cosine(bench.step(f, context), plain) for f in FORMS}
        runs = {f: (lambda f=f, c=context: bench.time(f, c)) for f in FORMS}
        _, times = interleave(rounds, lambda: None, runs)
        stats = {f: stat([[t * 1e3 for t in r] for r in times[f]], median) for f in FORMS}
        size = {f: _bytes_read(bench.sessions[f], context) for f in FORMS}
        yield {
            "dtype": bench.dtype,
            "context": context,
            "ms": stats,
            "ms_without_context": rest,
            "share_of_plain_bytes": {f: size[f] / size["off"] for f in FORMS},
            "cosine_of_logits": agreement,
            "fastest": _fastest(stats),
        }


def _fastest(stats: dict[str, Stat]) -> str:
    """Return the form that beats the plain caches by more than the spread of both, else `off`."""
    best = min(stats, key=lambda f: stats[f].value)
    return best if stats[best].differs(stats["off"]) else "off"


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), -1).min())


def _bytes_read(session: Any, context: int) -> int:
    """Count the bytes of the cache's prefix that a step at this context reads."""
    views = session.state.views(context)
    return sum(t.numel() * t.element_size() for t in views.values())


# --- accuracy ---------------------------------------------------------------------------------


def accuracy_rows(lengths: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row for each dtype and form over random tokens, against float64 and plain caches."""
    spec = spec_file("accuracy", "sliding", "full", "sliding", "full")
    total = max(lengths)
    tokens = torch.randint(3, 256, (1, total), generator=torch.Generator().manual_seed(0))
    exact = _logits(spec, "f64", "off", tokens)
    for dtype in ("f32", "bf16"):
        plain = _logits(spec, dtype, "off", tokens)
        for form in FORMS:
            got = plain if form == "off" else _logits(spec, dtype, form, tokens)
            for n in lengths:
                at = slice(max(0, n - 256), n)
                yield {
                    "dtype": dtype,
                    "form": form,
                    "tokens": n,
                    "rms_error": _rms_error(got[at], exact[at]),
                    "rms_from_plain": _rms_error(got[at], plain[at]),
                    "bit_equal_to_plain": bool(torch.equal(got[:n], plain[:n])),
                    "same_top_token": float(
                        (got[at].argmax(-1) == exact[at].argmax(-1)).double().mean()
                    ),
                }


def _logits(spec: Spec, dtype: str, form: str, tokens: torch.Tensor) -> torch.Tensor:
    """Return [T, vocab] by the interpreter, in chunks; weights are those of bf16 in every dtype."""
    declared, kind = "f32" if dtype == "f64" else dtype, torch_dtype(dtype)
    plain = build_program(spec, all_logits=True, dtype=declared)
    graphs = run_program(plain, options=PassOptions((LatentOptions(form),))).graphs
    source = RandomCheckpoint(spec, 0, torch.bfloat16)
    names = {v.name for g in graphs.values() for v in g.params}
    params = {n: source.tensor(checkpoint_name(n)).to(kind) for n in names}
    state = empty_state(
        graphs["prefill"], {"B": 1, "C": tokens.shape[1]}, kind if dtype == "f64" else None
    )
    out, chunk = [], 256
    for start in range(0, tokens.shape[1], chunk):
        piece = tokens[:, start : start + chunk]
        feeds, _ = interpret(graphs["embed"], {"tokens": piece}, params, {})
        feeds["positions"] = torch.arange(start, start + piece.shape[1])[None]
        feeds["lengths"] = torch.tensor([piece.shape[1]])
        results, state = interpret(graphs["prefill"], feeds, params, state)
        out.append(results["logits"][0])
    return torch.cat(out)


def _rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the root mean square of the difference, relative to that of the wanted logits."""
    got, want = got.double(), want.double()
    return float(((got - want).pow(2).mean() / want.pow(2).mean()).sqrt())


# --- report -----------------------------------------------------------------------------------


def decode_line(r: dict[str, Any]) -> list[str]:
    times = (f"{r['ms'][f].value:.3f} ± {r['ms'][f].spread:.3f}" for f in FORMS)
    shares = (f"{r['share_of_plain_bytes'][f]:.1%}" for f in FORMS[1:])
    rest = f"{r['ms_without_context']['off']:.3f}"
    cosine = f"{min(r['cosine_of_logits'].values()):.6f}"
    return [f"{r['dtype']} {r['context']}", *times, r["fastest"], rest, *shares, cosine]


def accuracy_line(r: dict[str, Any]) -> list[str]:
    errors = (f"{r[k]:.2e}" for k in ("rms_error", "rms_from_plain"))
    same = f"{r['same_top_token']:.3f}", str(r["bit_equal_to_plain"])
    return [f"{r['dtype']} {r['form']} {r['tokens']}", *errors, *same]


DECODE = ("decode", *(f"{f} ms" for f in FORMS), "fastest", "context 1")
DECODE_HEAD = [*DECODE, *(f"{f} bytes" for f in FORMS[1:]), "cosine"]
ACCURACY_HEAD = ["accuracy", "error", "from plain", "top token", "bit-equal"]


def keep_table(spec: Spec, rows: list[dict[str, Any]]) -> None:
    """Replace this device's and shape's rows of the shipped table; rows of others stay."""
    full, heads = spec.text.full, spec.text.num_attention_heads
    rotated = 2 * rotated_pairs(full.rope.kind, full.head_dim, full.rope.rotary_fraction)
    shape = (full.head_dim, rotated, heads // full.num_key_value_heads)
    new = [LatentMeasurement("cpu", r["dtype"], *shape, r["context"], r["fastest"]) for r in rows]
    write_table([*new, *(r for r in read_table() if key(r) not in set(map(key, new)))])


def key(r: LatentMeasurement) -> tuple[Any, ...]:
    """Return the facts that a row is about."""
    return (r.device, r.dtype, r.head_dim, r.rotated, r.group, r.context)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=numbers, default=numbers(CONTEXTS))
    parser.add_argument("--dtypes", default="bf16,f32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--lengths", type=numbers, default=(256, 1024, 4096), help="of texts")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    spec = spec_file("decode", "full")
    rows = []
    for dtype in args.dtypes.split(","):
        for row in decode_rows(Bench(spec, dtype, args.contexts, args.steps), args.rounds):
            rows.append(row)
            print(*decode_line(row), flush=True)
    decode = aligned([DECODE_HEAD, *map(decode_line, rows)], indent=0)
    accuracy = aligned([ACCURACY_HEAD, *map(accuracy_line, accuracy_rows(args.lengths))], indent=0)
    print(accuracy, end="")
    if args.save:
        save("latent", f"{SHAPE}\n\n{decode}\n{accuracy}")
        keep_table(spec, rows)


if __name__ == "__main__":
    main()
