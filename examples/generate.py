"""Continue prompts, or answer messages with --chat, with a model: an engine directory, a GGUF file,
a checkpoint directory, or a variant whose weights are in the Hugging Face cache.

    python examples/generate.py gemma-3-270m.gguf "The sky is" "Once upon a time"
"""

import argparse

import g4ir

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("prompts", nargs="+")
parser.add_argument("--chat", action="store_true")
parser.add_argument("--max-new-tokens", type=int, default=32)
parser.add_argument("--backend", help="of the engine that is built on first use (default torch)")
args = parser.parse_args()
options = {"backend": args.backend} if args.backend else {}

# The engine is built on first use and cached in ~/.cache/g4ir/engines.
with g4ir.load(args.model, **options) as engine:
    tokenizer = engine.tokenizer()
    prompts = args.prompts
    if not args.chat:
        bos = engine.spec.tokens.bos
        prompts = [[bos, *tokenizer.encode(p, add_special_tokens=False).ids] for p in prompts]
    answers = engine.generate(prompts, args.max_new_tokens, chat=args.chat)
    for prompt, ids in zip(args.prompts, answers):
        print(f"{prompt!r}: {tokenizer.decode(ids)!r}")
