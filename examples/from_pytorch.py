"""Convert a PyTorch Transformer to regard, run it, change its pattern, and convert it back.

python examples/from_pytorch.py
"""

import torch
from torch import nn

import regard as rg
from regard.interop import from_torch, to_torch

torch.manual_seed(0)

# A model of PyTorch's own, in evaluation mode.
theirs = nn.Transformer(64, nhead=4, num_encoder_layers=2, num_decoder_layers=2, batch_first=True).eval()

ours = from_torch(theirs)
print(ours.spec, "\n")

# The same outputs. PyTorch takes masks at each call (True = not allowed), for the causal target and for padded keys;
# regard declares the causal pattern and takes lengths for the padding.
source, target = torch.randn(2, 11, 64), torch.randn(2, 7, 64)
lengths = torch.tensor([11, 5])
hidden = torch.arange(11) >= lengths[:, None]
padding = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
expected = theirs(source, target, tgt_mask=~rg.causal().allowed(7), **padding)
out = ours(source, target, source_lengths=lengths)
print(f"largest difference of the outputs   {(out - expected).abs().max():.1e}")

# The same gradients.
(g,) = torch.autograd.grad(out[..., 0].sum(), ours.decoder.blocks[0].cross.w_o.weight)
(e,) = torch.autograd.grad(expected[..., 0].sum(), theirs.decoder.layers[0].multihead_attn.out_proj.weight)
print(f"largest difference of the gradients {(g - e).abs().max() / e.abs().max():.1e} (relative)")

# The same weights under another pattern: the target attends to its last four tokens only.
near = from_torch(theirs, pattern=rg.causal() & rg.window(3))
pairs = [m.spec.decoder.block.attention.pattern.count(1000) for m in (ours, near)]
print("pairs of 1000 target tokens         {:,} → {:,}".format(*pairs))

# And back, with the same bits.
back = to_torch(ours)
assert all(torch.equal(p, q) for p, q in zip(theirs.parameters(), back.parameters(), strict=True))
print(f"{type(back).__name__} with {sum(p.numel() for p in back.parameters()):,} parameters, bit for bit")

# What PyTorch cannot express is refused with a reason.
try:
    to_torch(rg.Attention(64, heads=8, kv_heads=2).build())
except rg.SpecError as error:
    print(f"\nrefused: {error}")
