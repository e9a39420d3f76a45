"""Attention maps: for the last token of a text, the tokens that each layer attends to most.

    python examples/attention_maps.py gemma-3-270m.gguf "The capital of France is" --plot maps.png

The plot has maps of at most six layers, averaged over heads: rows are queries, columns keys.
"""

import argparse

import g4ir

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text")
parser.add_argument("--backend", default="torch")
parser.add_argument("--plot", help="PNG or SVG file (needs matplotlib)")
args = parser.parse_args()

with g4ir.load(args.model, backend=args.backend, max_seq=512) as engine:
    tokenizer = engine.tokenizer()
    ids = [engine.spec.tokens.bos, *tokenizer.encode(args.text, add_special_tokens=False).ids]
    maps = {k: t[0].float() for k, t in engine.values(ids, ["L*.attn.probs"]).items()}

words = [tokenizer.id_to_token(i) for i in ids]
for name, probs in maps.items():  # [queries, heads, keys]
    heads = [f"{words[i]!r} {p:.2f}" for p, i in zip(*(t.tolist() for t in probs[-1].max(-1)))]
    print(f"{name:16}", "  ".join(heads))

if args.plot:
    from g4ir.ui.plots import figure

    shown = [*maps.items()][:: -(-len(maps) // 6)]
    with figure(args.plot, 2.5 * len(shown), 2.9, len(shown)) as columns:
        for axes, (name, probs) in zip(columns, shown):
            axes.imshow(probs.mean(1), cmap="Blues", vmin=0, vmax=1)
            axes.set(title=name.removesuffix(".attn.probs"), xticks=[], yticks=[])
