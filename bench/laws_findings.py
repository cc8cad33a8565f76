"""Bugs that `check` reports in current releases, each reproduced without regard. Written into docs/laws.md."""

from typing import NamedTuple


class Finding(NamedTuple):
    """A report that can be sent to the library as it is."""

    title: str
    about: str
    snippet: str
    libraries: tuple[str, ...]
    expected: str
    observed: str


NOTES = """
Models of transformers and x-transformers compute softmax or norms in float32 for every input dtype, so they are
checked with the tolerances of float32. Their configurations are reduced to two layers of width 32, since the code is
checked, not the weights. "finfo.min" is SDPA with masked pairs set to the smallest finite number, as in much model
code. "FA4 reference" is the function in plain PyTorch that the tests of flash-attn-4 compare its kernels with; the
kernels need a GPU. Its padding masks are not tested: its causal mask is aligned with the last real query and key,
which is another convention. timm and diffusers are checked without an adapter: their arguments are detected from
signatures and by probing. Promises that a library excludes (SDPA: a mask together with `is_causal`) are not tested.
"""

FINDINGS = (
    Finding(
        "`nn.MultiheadAttention`: a batch row of padding only gives NaN, and NaN gradients for the whole batch",
        "P03. Row 1 is padding; the loss uses only row 0. With `need_weights=False` the output is NaN in evaluation "
        "without gradients (the fast path), and zeros before W_O otherwise.",
        """
import torch
from torch import nn

torch.manual_seed(0)
attention = nn.MultiheadAttention(16, 4, batch_first=True)
x, padding = torch.randn(2, 3, 16), torch.tensor([[False, False, False], [True, True, True]])
o, _ = attention(x, x, x, key_padding_mask=padding)
assert o[1].isnan().all() and o[0].isfinite().all()
o[0].sum().backward()
assert attention.in_proj_weight.grad.isnan().all()

with torch.no_grad():
    o, _ = attention.eval()(x, x, x, key_padding_mask=padding, need_weights=False)
assert o[1].isnan().all()
""",
        ("torch",),
        "Finite outputs and gradients of row 0; for row 1 zeros, or any finite numbers.",
        "Row 1 is NaN, and after a backward pass of row 0 alone every gradient of `in_proj_weight` is NaN.",
    ),
    Finding(
        "`nn.TransformerEncoder(norm_first=True)`: NaN for a row of padding, in evaluation",
        "P03. In training, and with gradients, the same row is finite.",
        """
import warnings

import torch
from torch import nn

x, padding = torch.randn(2, 3, 16), torch.tensor([[False, False, False], [True, True, True]])
layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    encoder = nn.TransformerEncoder(layer, 2).eval()
assert encoder(x, src_key_padding_mask=padding).isfinite().all()
with torch.no_grad():
    assert encoder(x, src_key_padding_mask=padding)[1].isnan().all()
""",
        ("torch",),
        "The same finite outputs in evaluation as with gradients.",
        "Under `no_grad` the row of padding is NaN; with gradients it is finite.",
    ),
    Finding(
        "SDPA: NaN or infinity in a masked value reaches valid outputs",
        "P01. A weight of 0 times NaN is NaN: uninitialized padding is enough.",
        """
import torch
import torch.nn.functional as F

v = torch.tensor([[1.0], [float("nan")]])
o = F.scaled_dot_product_attention(torch.ones(1, 1), torch.ones(2, 1), v, torch.tensor([[True, False]]))
assert o.isnan().all()
""",
        ("torch",),
        "1, the only allowed value: a masked pair takes no part.",
        "NaN.",
    ),
    Finding(
        "`nn.MultiheadAttention`, `nn.TransformerDecoder`, x-transformers: NaN in the padding reaches real positions",
        "P02, the same cause. (`nn.TransformerEncoder` with its nested tensors does not read the padding.)",
        """
import torch
from torch import nn

attention = nn.MultiheadAttention(16, 4, batch_first=True)
x, padding = torch.randn(1, 3, 16), torch.tensor([[False, False, True]])
x[0, 2] = float("nan")
o, _ = attention(x, x, x, key_padding_mask=padding)
assert o[0, :2].isnan().all()
""",
        ("torch",),
        "Real positions do not depend on what is in the padding.",
        "All real positions are NaN.",
    ),
    Finding(
        "A mask of `finfo.min`: a query with no allowed key averages the masked values",
        "P03. Every score is the same number, so softmax is uniform, also over the future and over padding.",
        """
import torch
import torch.nn.functional as F

q, k, v = torch.randn(3, 1, 4, 8)
smallest = torch.full((4, 4), torch.finfo(q.dtype).min)
o = F.scaled_dot_product_attention(q, k, v, smallest)
torch.testing.assert_close(o, v.mean(-2, keepdim=True).expand_as(o))
assert (F.scaled_dot_product_attention(q, k, v, torch.zeros(4, 4, dtype=torch.bool)) == 0).all()
""",
        ("torch", "transformers"),
        "Zeros, as SDPA gives with a bool mask.",
        "The mean of all masked values.",
    ),
    Finding(
        "transformers, T5: in a row of padding the decoder attends to the future",
        "P03, the same cause: the target row is only padding, and its first position depends on its second.",
        """
import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
t5 = transformers.T5ForConditionalGeneration(config).eval()
given = {"input_ids": torch.tensor([[5, 6, 7]]), "decoder_attention_mask": torch.tensor([[0, 0]])}
with torch.no_grad():
    a, b = (t5(decoder_input_ids=torch.tensor([[3, last]]), **given).logits[0, 0] for last in (4, 9))
assert (a - b).abs().max() > 1e-3
""",
        ("torch", "transformers"),
        "Position 0 does not depend on position 1, which is in its future, padding or not.",
        "The logits of position 0 change by more than 0.001.",
    ),
    Finding(
        "transformers, Llama and GPT-2: packed documents attend to one another if a mask of ones is given",
        "L47. Position ids that restart at 0 isolate documents only if no attention mask is given and no cache is "
        "used; tokenizers and collators return a mask. Reported as transformers#46634, closed without a change.",
        """
import torch
import transformers

torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=31, **sizes)).eval()
position_ids = torch.tensor([[0, 1, 2, 0, 1, 2]])  # two documents of three tokens


def second_document(first_token, **given):
    ids = torch.tensor([[first_token, 5, 6, 7, 8, 9]])
    with torch.no_grad():
        return llama(input_ids=ids, position_ids=position_ids, **given).logits[0, 3:]


ones = torch.ones(1, 6, dtype=torch.long)
assert (second_document(3, attention_mask=ones) - second_document(4, attention_mask=ones)).abs().max() > 1e-4
assert (second_document(3) - second_document(4)).abs().max() > 1e-4  # using the cache is enough
assert torch.equal(second_document(3, use_cache=False), second_document(4, use_cache=False))
""",
        ("torch", "transformers"),
        "The logits of the second document do not depend on the first one, with a mask of ones as without a mask.",
        "With a mask of ones, or with the cache that is on by default, they change by more than 0.0001.",
    ),
    Finding(
        "transformers, Llama with eager attention in float64: left padding makes every output NaN",
        "Its mask is `finfo(float64).min`, its softmax runs in float32, where that is −∞: padded queries are 0/0, "
        "and from the second layer on every query attends to their NaN. In float32 and bfloat16 it is finite.",
        """
import torch
import transformers

sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
config = transformers.LlamaConfig(vocab_size=31, attn_implementation="eager", **sizes)
llama = transformers.LlamaForCausalLM(config).eval()
ids, left = torch.tensor([[0, 5, 6, 7]]), torch.tensor([[0, 1, 1, 1]])
with torch.no_grad():
    assert llama(input_ids=ids, attention_mask=left).logits.isfinite().all()
    assert llama.double()(input_ids=ids, attention_mask=left).logits.isnan().all()
""",
        ("torch", "transformers"),
        "Finite logits, as in float32.",
        "All logits are NaN in float64.",
    ),
    Finding(
        "SDPA on a CPU: its gradient is not differentiable",
        "P04. No gradient penalties, no Hessian-vector products, unless the math backend is selected.",
        """
import torch
import torch.nn.functional as F

q = torch.randn(1, 1, 3, 4, requires_grad=True)
(g,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).square().sum(), q, create_graph=True)
try:
    g.square().sum().backward()
except RuntimeError as error:
    assert "is not implemented" in str(error)
else:
    raise AssertionError("it can, now")
""",
        ("torch",),
        "A second derivative, as the math backend has.",
        "RuntimeError: derivative … is not implemented.",
    ),
)
