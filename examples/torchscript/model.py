#!/usr/bin/env python3
"""model.py FILE: a small model, written in Python and saved as TorchScript for main.cpp.

It takes 8 numbers and returns 1. Nothing in it knows about sharding.
"""
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim: int = 64, depth: int = 3):
        super().__init__()
        self.inward = nn.Linear(8, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.outward = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: model.py FILE")
    torch.manual_seed(1)
    torch.jit.script(Net()).save(sys.argv[1])
