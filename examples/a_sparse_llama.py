# %% [markdown]
# # A sparse Llama
#
# Your own pattern in a Hugging Face model: what it computes, what it costs, and how to remove it.

# %%
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import regard as rg
from regard.interop import huggingface  # registers attn_implementation='regard'

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=99,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation="regard").eval()
ids = torch.arange(1, 65)[None]
huggingface.explain(model, ids)[0]

# %% [markdown]
# A window of 16 tokens and the first four (attention sinks), in every layer:

# %%
p = rg.causal() & (rg.window(16) | rg.sinks(4))
p

# %%
with torch.no_grad():
    dense = model(ids).logits
    with rg.use(model, p):
        sparse = model(ids).logits
    again = model(ids).logits
assert torch.equal(dense, again)  # leaving the block puts the model back
assert torch.allclose(dense[:, :17], sparse[:, :17], atol=1e-5)  # the first 17 positions see the same keys
(dense - sparse).abs().amax(-1)[0, [0, 16, 40, 63]]

# %% [markdown]
# What is saved? Pairs of query and key, exactly, at any length:

# %%
for n in (64, 4_096, 131_072):
    print(
        f"{n:>7,}: {p.count(n):>13,} of {rg.causal().count(n):>13,} pairs, {p.count(n) / rg.causal().count(n):.2%}"
    )
