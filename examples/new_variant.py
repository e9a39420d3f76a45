"""A variant that nobody shipped: a few lines of YAML, an engine, and a check against transformers.

python examples/new_variant.py build/my-variant
"""

import sys
from pathlib import Path

import g4ir
from g4ir.check.logits import verify_engine

SPEC = """\
schema: 1
extends: tiny-moe
name: my-variant
text:
  num_hidden_layers: 8
  pattern: [sliding, sliding, sliding, full]
  sliding: {window: 6}
  moe: {num_experts: 6}
"""

folder = Path(sys.argv[1])
folder.mkdir(parents=True)
(folder / "my-variant.yaml").write_text(SPEC)
spec = g4ir.load_spec(folder / "my-variant.yaml")
for field, base, ours in g4ir.diff_specs(g4ir.load_spec("tiny-moe"), spec):
    print(f"{field}: {base} -> {ours}")
engine = g4ir.build(spec, folder / "engine", backend="reference", random_weights=0, max_seq=128)
with engine:
    print(verify_engine(engine, against="hf").text())
