#!/usr/bin/env python3
"""export_jit.py FILE: writes a small scripted transformer, as people export their models from Python.

Its forward takes ids and targets, [batch, tokens] each, and returns the loss.
"""
import sys

import torch
from torch import nn
import torch.nn.functional as F

VOCABULARY, TOKENS, DIM, HEADS, DEPTH = 29, 6, 16, 2, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.attention_norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp_norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.position = nn.Parameter(0.1 * torch.randn(TOKENS, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten()) * self.scale


def main():
    torch.manual_seed(7)
    torch.jit.script(Net()).save(sys.argv[1])


if __name__ == "__main__":
    main()
