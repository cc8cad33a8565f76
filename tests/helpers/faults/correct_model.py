"""Correct small models: an encoder and a decoder over tokens, pre-norm blocks, learned positions."""

import torch
from torch import nn

from faults.correct_module import Attention


class Block(nn.Module):
    """x + F(LN(x)), for attention and feed-forward."""

    def __init__(self, d_model, heads, causal):
        super().__init__()
        self.attention = Attention(d_model, heads, heads, causal=causal)
        self.norm, self.norm_ff = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.ff = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))

    def forward(self, x, **options):
        x = x + self.attention(self.norm(x), **options)
        return x + self.ff(self.norm_ff(x))


class Model(nn.Module):
    """Tokens → logits; if causal, each position predicts the next token."""

    def __init__(self, causal=True, vocab=13, d_model=24, heads=4, layers=2, max_length=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d_model), nn.Embedding(max_length, d_model)
        self.blocks = nn.ModuleList(Block(d_model, heads, causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d_model), nn.Linear(d_model, vocab)

    def forward(self, ids, *, lengths=None, documents=None, cache=None):
        start = 0 if not cache else cache["filled"]
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        for i, block in enumerate(self.blocks):
            layer_cache = None if cache is None else cache.setdefault(i, {})
            x = block(x, lengths=lengths, documents=documents, cache=layer_cache)
        if cache is not None:
            cache["filled"] = start + ids.shape[1]
        return self.head(self.norm(x))
