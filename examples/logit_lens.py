"""Logit lens: the next token that each layer's output predicts through the final norm and head.

    python examples/logit_lens.py gemma-3-270m.gguf "The capital of France is" --plot lens.png

A row is a layer, a column a token of the text; the picture's colour is the token's probability.
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
    tokenizer, text = engine.tokenizer(), engine.spec.text
    ids = [engine.spec.tokens.bos, *tokenizer.encode(args.text, add_special_tokens=False).ids]
    outputs = engine.values(ids, ["L*.out"])
    norm = engine.param("final.w").float() + float(text.norms_about_zero)
    head = engine.param("embed.table" if text.tie_word_embeddings else "head.w").float()

best = []
for x in (t[0].float() for t in outputs.values()):
    logits = x * (x.pow(2).mean(-1, keepdim=True) + text.rms_norm_eps).rsqrt() * norm @ head.T
    if cap := text.final_logit_softcapping:
        logits = (logits / cap).tanh() * cap
    best.append(logits.softmax(-1).max(-1))

rows = (ids, *(b.indices.tolist() for b in best))
words = [[tokenizer.id_to_token(i) for i in row] for row in rows]
for layer, row in enumerate(words[1:]):
    print(f"L{layer:<3} {row[-1]!r:20} {best[layer].values[-1]:.3f}")

if args.plot:
    from g4ir.ui.plots import figure

    with figure(args.plot, 1 + 0.75 * len(ids), 1 + 0.3 * len(best)) as axes:
        axes.imshow([b.values.tolist() for b in best], aspect="auto", cmap="Blues", vmin=0, vmax=1)
        for layer, row in enumerate(words[1:]):
            for at, word in enumerate(row):
                dark = "white" if best[layer].values[at] > 0.6 else "black"
                axes.text(at, layer, word[:10], ha="center", va="center", fontsize=6.5, color=dark)
        axes.set_xticks(range(len(ids)), words[0], fontsize=8)
        axes.set_yticks(range(len(best)), [f"L{i}" for i in range(len(best))], fontsize=8)
        axes.set_title("the most likely next token of each layer's output")
