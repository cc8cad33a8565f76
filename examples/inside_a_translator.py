# %% [markdown]
# # Inside a translator
#
# The translator that is included in regard: its output, what each word attended to, which heads matter.

# %%
import torch

import regard as rg
from regard.cli.models import included_translator, own_output

text = "You do not have permission to open this file."
rg.translate(text)

# %%
translator = included_translator()
model, tokens = translator.model, translator.tokenizer
source = torch.tensor([tokens.encode([text])[0]])
target = own_output(translator, source)  # greedily generated, with its start token
view = rg.look(model, (source, target), tokens.words)
view.title, len(view.calls), sum(c.heads for c in view.calls)

# %% [markdown]
# Cross-attention: for each token of the output, the source token with the largest mean weight.

# %%
cross = [c for c in view.calls if c.role == "cross"]
mean = torch.stack([view.map(c.layer, h) for c in cross for h in range(c.heads)]).mean(0)
queries, keys = view.queries(cross[0].layer), view.keys(cross[0].layer)
for query, j in zip(queries, mean.argmax(-1).tolist()):
    print(f"{query:>12} -> {keys[j]}")

# %% [markdown]
# Kinds of heads, and the effect of removing each: a large weight does not prove influence.

# %%
from collections import Counter

print(Counter(kind.name for layer in view.kinds for kind in layer))
effects = view.remove_heads().effects
for (layer, head), effect in sorted(effects.items(), key=lambda item: -item[1])[:5]:
    print(f"layer {layer}, head {head}: the output changes by {effect:.1%}")

# %% [markdown]
# The page with all maps is the view itself (`view` as the last line of a cell), or `view.save('heads.html')`.

# %%
view.save("heads.html").stat().st_size
