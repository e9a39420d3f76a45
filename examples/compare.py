"""A model unquantised and quantised: NLL and perplexity of a text, and decode speed.

python examples/compare.py gemma-3-270m.gguf README.md --backend torch --quant int8
"""

import argparse
import time
from pathlib import Path

import g4ir

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text", type=Path)
parser.add_argument("--backend", default="torch")
parser.add_argument("--quant", default="int8")
args = parser.parse_args()

for quant in (None, args.quant):
    options = {"backend": args.backend, "quant": quant, "max_seq": 512, "all_logits": True}
    with g4ir.load(args.model, **options) as engine:
        (score,) = g4ir.score(engine, args.text.read_text())
        start = time.perf_counter()
        tokens = engine.generate(list(score.ids[:16]), 32, stop_ids=())
        rate = len(tokens) / (time.perf_counter() - start)
        quality = f"nll {score.nll:.4f}  ppl {score.ppl:.2f}"
        print(f"{quant or 'as it is':10} {quality}  {rate:.1f} tokens/s")
