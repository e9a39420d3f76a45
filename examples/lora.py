"""Train a LoRA adapter on the model as an nn.Module, here of random weights on random tokens.

    python examples/lora.py tiny-moe

`g4ir.module("gemma-4-E2B-it")` is the model of a checkpoint directory.
"""

import sys

import torch
from torch import nn

import g4ir


class Lora(nn.Module):
    """A frozen projection, and a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * rank**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T * self.scale


torch.manual_seed(0)
spec = g4ir.load_spec(sys.argv[1] if sys.argv[1:] else "tiny-moe")
module = g4ir.module(spec).requires_grad_(False)
for layer in module.model.layers:
    for name in ("q_proj", "o_proj"):
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
