"""The model as an nn.Module through torch-tensorrt: exported, and compiled where that package and a
GPU are (`pip install torch-tensorrt`). The engines of `g4ir build --backend trt` do not need it.

    python examples/torch_tensorrt.py tiny-dense
"""

import importlib.util
import sys

import torch

import g4ir

spec = g4ir.load_spec(sys.argv[1] if sys.argv[1:] else "tiny-dense")
device = "cuda" if torch.cuda.is_available() else "cpu"
module = g4ir.module(spec, device=device).eval()
ids = torch.randint(3, spec.text.vocab_size - 16, (1, 24), device=device)

length = torch.export.Dim("S", min=2, max=512)
program = torch.export.export(module, (ids,), dynamic_shapes=({1: length},))
want = module(ids[:, :17]).logits
print(f"exported {len(program.graph.nodes)} nodes")
print(f"largest difference {(program.module()(ids[:, :17]).logits - want).abs().max().item():.2e}")

if device == "cpu" or importlib.util.find_spec("torch_tensorrt") is None:
    print("not compiled: torch-tensorrt and a GPU are needed")
else:
    import torch_tensorrt

    shapes = {"min_shape": (1, 2), "opt_shape": (1, 24), "max_shape": (1, 512)}
    inputs = [torch_tensorrt.Input(**shapes, dtype=torch.int64)]
    compiled = torch_tensorrt.dynamo.compile(program, inputs=inputs)
    difference = (compiled(ids[:, :17]).logits - want).abs().max().item()
    print(f"largest difference by torch-tensorrt {difference:.2e}")
