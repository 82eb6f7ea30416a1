"""A GPT as one would write it in plain torch, GPT-2 style, tied embeddings: the yardstick of `step_time` and others."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.projection = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        parts = self.qkv(self.attention_norm(x)).split(hidden, dim=2)
        query, key, value = (p.view(batch, sequence, self.heads, -1).transpose(1, 2) for p in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """Called with tokens and labels [batch, sequence], returns the mean loss."""

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
