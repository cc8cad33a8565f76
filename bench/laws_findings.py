"""What `check` found in current releases, each shown without regard in a few lines. Written into docs/laws.md."""

from typing import NamedTuple


class Finding(NamedTuple):
    title: str
    about: str
    snippet: str


NOTES = """
Models of transformers and x-transformers compute softmax or norms in float32 whatever comes in, so they are held to
the tolerances of float32. Their configurations are cut to two layers, 32 wide: what is judged is the code.
"finfo.min" is SDPA with forbidden pairs masked by the least finite number, as much model code does it. Promises that
a library denies (SDPA: a mask together with `is_causal`) are not tried.
"""

FINDINGS = (
    Finding(
        "`nn.MultiheadAttention`: a row of padding alone gives NaN, and NaN gradients for the whole batch",
        "P03. Row 1 is padding; the loss reads row 0 alone. With `need_weights=False` it is NaN in evaluation "
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
    ),
    Finding(
        "SDPA: NaN or infinity in a masked value reaches valid outputs",
        "P01. A weight of 0 times NaN is NaN: uninitialised padding is enough.",
        """
import torch
import torch.nn.functional as F

v = torch.tensor([[1.0], [float("nan")]])
o = F.scaled_dot_product_attention(torch.ones(1, 1), torch.ones(2, 1), v, torch.tensor([[True, False]]))
assert o.isnan().all()
""",
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
    ),
    Finding(
        "A mask of `finfo.min`: a query that may look nowhere averages what is forbidden",
        "P03. Every score is the same least number, so softmax is uniform: over the future and over padding too.",
        """
import torch
import torch.nn.functional as F

q, k, v = torch.randn(3, 1, 4, 8)
least = torch.full((4, 4), torch.finfo(q.dtype).min)
o = F.scaled_dot_product_attention(q, k, v, least)
torch.testing.assert_close(o, v.mean(-2, keepdim=True).expand_as(o))
assert (F.scaled_dot_product_attention(q, k, v, torch.zeros(4, 4, dtype=torch.bool)) == 0).all()
""",
    ),
    Finding(
        "transformers, T5: in a row of padding the decoder sees its future",
        "P03, the same cause: the target row is padding alone, and its first position answers to its second.",
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
    ),
    Finding(
        "transformers, Llama and GPT-2: packed documents see one another beside a mask of ones",
        "L47. Position ids that start again isolate documents only where no attention mask is given (and no cache is "
        "made); tokenizers and collators give one. Reported as transformers#46634, closed without a change.",
        """
import torch
import transformers

torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=31, **sizes)).eval()
places = torch.tensor([[0, 1, 2, 0, 1, 2]])  # two documents of three tokens


def second_document(first_token, **given):
    ids = torch.tensor([[first_token, 5, 6, 7, 8, 9]])
    with torch.no_grad():
        return llama(input_ids=ids, position_ids=places, **given).logits[0, 3:]


ones = torch.ones(1, 6, dtype=torch.long)
assert (second_document(3, attention_mask=ones) - second_document(4, attention_mask=ones)).abs().max() > 1e-4
assert (second_document(3) - second_document(4)).abs().max() > 1e-4  # the cache alone is enough
assert torch.equal(second_document(3, use_cache=False), second_document(4, use_cache=False))
""",
    ),
    Finding(
        "transformers, Llama with eager attention in float64: padding on the left turns everything into NaN",
        "Its mask is `finfo(float64).min`, its softmax runs in float32, where that is −∞: padded queries are 0/0, "
        "and from the second layer on every query reads their NaN. In float32 and bfloat16 it is finite.",
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
    ),
    Finding(
        "SDPA on a CPU: its gradient cannot be differentiated again",
        "P04. No gradient penalties, no Hessian-vector products, unless the math backend is asked for.",
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
    ),
)
