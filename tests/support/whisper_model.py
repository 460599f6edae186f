"""A module with the structure and the names of openai-whisper's, and what it computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class _Attention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.value, self.out = (nn.Linear(size, size) for _ in range(3))
        self.key = nn.Linear(size, size, bias=False)

    def forward(self, x: torch.Tensor, other: torch.Tensor, causal: bool) -> torch.Tensor:
        q, k, v = self.query(x), self.key(other), self.value(other)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(found.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, size: int, heads: int, cross: bool) -> None:
        super().__init__()
        self.attn, self.attn_ln = _Attention(size, heads), nn.LayerNorm(size)
        if cross:
            self.cross_attn, self.cross_attn_ln = _Attention(size, heads), nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.mlp_ln = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor, sound: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.attn_ln(x)
        x = x + self.attn(normed, normed, causal=sound is not None)
        if sound is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), sound, causal=False)
        return x + self.mlp(self.mlp_ln(x))


class Whisper(nn.Module):
    """Sound and text to logits, with two layers each."""

    def __init__(self, size: int, heads: int, mels: int, length: int, words: int) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.conv1 = nn.Conv1d(mels, size, 3, padding=1)
        self.encoder.conv2 = nn.Conv1d(size, size, 3, stride=2, padding=1)
        self.encoder.register_buffer("positional_embedding", torch.randn(length, size))
        self.encoder.blocks = nn.ModuleList(_Block(size, heads, False) for _ in range(2))
        self.encoder.ln_post, self.decoder.ln = nn.LayerNorm(size), nn.LayerNorm(size)
        self.decoder.token_embedding = nn.Embedding(words, size)
        self.decoder.positional_embedding = nn.Parameter(torch.randn(length, size))
        self.decoder.blocks = nn.ModuleList(_Block(size, heads, True) for _ in range(2))

    def forward(self, mel: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens."""
        x = F.gelu(self.encoder.conv2(F.gelu(self.encoder.conv1(mel)))).transpose(1, 2)
        x = x + self.encoder.positional_embedding
        for block in self.encoder.blocks:
            x = block(x)
        table, sound = self.decoder.token_embedding, self.encoder.ln_post(x)
        x = table(tokens) + self.decoder.positional_embedding[: tokens.shape[1]]
        for block in self.decoder.blocks:
            x = block(x, sound)
        return self.decoder.ln(x) @ table.weight.T
