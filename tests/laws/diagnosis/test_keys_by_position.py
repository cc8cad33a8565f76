"""Modules whose keys depend on positions by design: windows with sinks, blocks, strides; and those that mix positions
by a recurrence or a convolution. Right ones break no law, and faults of their windows and sinks are named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from long_cases import in_long
from regard.laws import check


class Masked(nn.Module):
    def __init__(self, d=16, heads=2):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def keep(self, i, j):
        return j <= i

    def forward(self, x):
        i = torch.arange(x.shape[1])
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.keep(i[:, None], i))
        return self.proj(o.transpose(1, 2).flatten(2))


class Streaming(Masked):
    """Causal sliding window of 4 keys, itself included, and the first 3 tokens as attention sinks."""

    window, num_sinks, wider, more, early = 4, 3, 0, 0, False

    def keep(self, i, j):
        sinks = j < self.num_sinks + self.more
        return ((j <= i) & (i - j < self.window + self.wider)) | (sinks if self.early else sinks & (j <= i))


class BothSides(Masked):
    """Sliding window of 3 keys on each side plus 2 attention sinks."""

    window, sinks = 3, 2

    def keep(self, i, j):
        return ((i - j).abs() <= 3) | (j < 2)


class Blocks(Masked):
    """Attention within blocks of 4 positions."""

    def keep(self, i, j):
        return i // 4 == j // 4


class Strided(Masked):
    """Causal strided attention: the last 4 keys, and every fourth key before them."""

    def keep(self, i, j):
        return (j <= i) & ((i - j < 4) | ((i - j) % 4 == 0))


class Global(Masked):
    """A window of 2 keys on each side, and a global first token."""

    def keep(self, i, j):
        return ((i - j).abs() <= 2) | (j == 0) | (i == 0)


class Prefix(Masked):
    """The first 3 positions see one another, as the prefix of a language model; the others are causal."""

    def keep(self, i, j):
        return (j <= i) | ((i < 3) & (j < 3))


class Scan(nn.Module):
    """A state space layer."""

    def __init__(self, d=16):
        super().__init__()
        self.decay, self.inputs = nn.Parameter(torch.rand(d)), nn.Linear(d, d)

    def forward(self, x):
        state, out = torch.zeros_like(x[:, 0]), []
        for each in self.inputs(x).unbind(1):
            state = self.decay.sigmoid() * state + each
            out.append(state)
        return torch.stack(out, 1)


class Hybrid(nn.Module):
    """Heads of two kinds, averaged."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return (self.first(x) + self.second(x)) / 2


class Convolved(nn.Module):
    """Self-attention, and a convolution beside it."""

    def __init__(self, d=16):
        super().__init__()
        self.attention, self.near = (
            nn.MultiheadAttention(d, 2, batch_first=True),
            nn.Conv1d(d, d, 3, padding=1),
        )

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0] + self.near(x.mT).mT


LAWS = ("L19", "L21", "L29", "L59", "L65")
RIGHT = {
    "window and sinks": Streaming,
    "window on both sides, and sinks": BothSides,
    "blocks": Blocks,
    "strided": Strided,
    "global token": Global,
    "prefix": Prefix,
    "attention and a state space": lambda: Hybrid(Masked(), Scan()),
    "attention and a convolution": Convolved,
}


@pytest.mark.parametrize("kind", [*[*RIGHT][::3], *in_long(*[*RIGHT][1::3], *[*RIGHT][2::3])])
def test_keys_by_position_are_no_fault(kind):
    torch.manual_seed(0)
    verdict = check(RIGHT[kind]().eval(), laws=LAWS, budget=5)
    assert not verdict.broken, str(verdict)


FAULTY = {
    "one key too wide": ({"wider": 1}, "window off by one"),
    "a sink is missing": ({"more": -1}, "sinks off by one"),
    "one sink too many": ({"more": 1}, "sinks off by one"),
    "no sinks": ({"more": -3}, "sinks ignored"),
    "sinks before their time": ({"early": True}, "masks combined with or"),
}


@pytest.mark.parametrize("kind", FAULTY)
def test_faults_of_a_window_with_sinks_are_named(kind):
    torch.manual_seed(0)
    changes, family = FAULTY[kind]
    verdict = check(
        type("Streaming", (Streaming,), {"__doc__": Streaming.__doc__, **changes})(), laws=LAWS, budget=5
    )
    assert verdict.cause is not None and verdict.cause.family == family
    assert "L65" in [outcome.law.number for outcome in verdict.broken]


class Attention(Masked):
    """Multi-head attention."""

    def forward(self, x, block_size=64):
        return torch.cat([super(Attention, self).forward(part) for part in x.split(block_size, 1)], 1)


def test_blocks_that_only_the_code_speaks_of_are_a_fault():
    verdict = check(Attention(), laws=["L65"], budget=5)
    assert [outcome.law.number for outcome in verdict.broken] == ["L65"]
