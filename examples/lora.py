"""Train a LoRA adapter on the model as an nn.Module, here of random weights on random tokens.

    python examples/lora.py tiny-moe my-lora
    g4ir serve tiny-moe --random-weights 0 --adapter mine=my-lora

`g4ir.module("gemma-4-E2B-it")` is the model of a checkpoint directory. The adapter is stored in
PEFT's format, which `g4ir build --adapter` merges too.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import g4ir


class Lora(nn.Module):
    """Linear layer with LoRA: y = W x + (alpha / rank) B A x, W frozen, A (`down`) and B (`up`)
    trained."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * rank**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T * self.scale


torch.manual_seed(0)
model, out = (*sys.argv[1:], "tiny-moe", "my-lora")[:2]
spec, targets = g4ir.load_spec(model), ("q_proj", "o_proj")
module = g4ir.module(spec, random_weights=0).requires_grad_(False)
for layer in module.model.layers:
    for name in targets:
        setattr(layer.self_attn, name, Lora(getattr(layer.self_attn, name)))

trained = [p for p in module.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
ids = torch.randint(3, spec.text.vocab_size - 16, (2, 32))
print(f"{sum(p.numel() for p in trained)} of {sum(p.numel() for p in module.parameters())} trained")
for step in range(20):
    loss = module(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step:2d}  loss {loss.item():.4f}")

Path(out).mkdir(exist_ok=True)
names = {".down": ".lora_A.weight", ".up": ".lora_B.weight"}
weights = {
    f"base_model.model.{name.removesuffix(end)}{new}": p.detach().contiguous()
    for name, p in module.named_parameters()
    for end, new in names.items()
    if p.requires_grad and name.endswith(end)
}
save_file(weights, Path(out, "adapter_model.safetensors"))
config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
Path(out, "adapter_config.json").write_text(json.dumps(config))
