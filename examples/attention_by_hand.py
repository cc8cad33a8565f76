# %% [markdown]
# # Attention by hand
#
# The formula in five lines, the same with a mask, and a check of both.

# %%
import torch

import regard as rg

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 6, 4).unbind()  # (batch, heads, positions, width)

# %% [markdown]
# Scores compare each query with each key; softmax turns them into weights; the output is a weighted sum of values.

# %%
scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
weights = scores.softmax(-1)
o = weights @ v
assert torch.allclose(o, rg.attention(q, k, v), atol=1e-6)
weights[0, 0].sum(-1)  # each row sums to one

# %% [markdown]
# A pattern defines which query may attend to which key. It is a value: it can be drawn, counted and combined.

# %%
p = rg.causal() & (rg.window(2) | rg.every(4))
p

# %%
allowed = p.allowed(6)
masked = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ v
assert torch.allclose(masked, rg.attention(q, k, v, p), atol=1e-6)
rg.explain(p, n=16_384)

# %% [markdown]
# Is the five-line version correct? `rg.check` tests the laws that every attention has to satisfy.
# Here the scale is omitted on purpose.


# %%
def mine(q, k, v, mask=None):
    scores = q @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


verdict = rg.check(mine, ["L03", "L06", "L34"])
print(verdict.cause.headline, "->", verdict.cause.fix)
