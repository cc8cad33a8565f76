"""Attentions that no one has seen: a style, one of several spellings of each of its steps, and at most one fault.

`entries(seed)` draws right ones and faulty ones. A style is a text with steps in angle brackets; RIGHT has equivalent
ways to write a step, FAULTS has wrong ones, each with the causes that name it ("a|b": either) and the fault in words.
Written before the first run of `check` on any of them; a seed that was looked at is no longer held out.
"""

# ruff: noqa: E501  # a step is one line
import random
import re

from . import Entry

MASK = {"mask", "masked"}
RIGHT = {
    "score": (
        "q @ k.mT / math.sqrt(q.shape[-1])",
        "(q * q.shape[-1] ** -0.5) @ k.mT",
        "torch.einsum('bhid,bhjd->bhij', q, k) * (1 / q.shape[-1] ** 0.5)",
        "torch.matmul(q / q.shape[-1] ** 0.25, (k / k.shape[-1] ** 0.25).transpose(-1, -2))",
    ),
    "soft": (
        "s.softmax(-1)",
        "F.softmax(s, dim=-1)",
        "torch.exp(s - torch.logsumexp(s, -1, keepdim=True))",
        "(lambda e: e / e.sum(-1, keepdim=True))(torch.exp(s - s.max(-1, keepdim=True).values))",
    ),
    "out": ("w @ v", "torch.matmul(w, v)", "torch.einsum('bhij,bhjd->bhid', w, v)"),
    "causal": (
        "s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -inf)",
        "torch.where(torch.arange(s.shape[-1]) <= torch.arange(s.shape[-2])[:, None] + s.shape[-1] - s.shape[-2], s, -inf)",
    ),
    "square": (  # causal where n = m
        "s.masked_fill(torch.triu(torch.ones_like(s, dtype=torch.bool), 1), -inf)",
        "s + torch.full(s.shape[-2:], -inf, dtype=s.dtype).triu(1)",
    ),
    "masked": ("s.masked_fill(~mask, -inf)", "torch.where(mask, s, torch.full_like(s, -inf))",
               "s.masked_fill(mask.logical_not(), torch.finfo(s.dtype).min)"),
    "padded": ("s.masked_fill(key_padding_mask[:, None, None, :], -inf)",
               "torch.where(key_padding_mask.unsqueeze(1).unsqueeze(2), torch.full_like(s, -inf), s)"),
    "kept": ("s.masked_fill(attention_mask[:, None, None, :] == 0, torch.finfo(s.dtype).min)",
             "s + (1.0 - attention_mask[:, None, None, :].to(s.dtype)) * torch.finfo(s.dtype).min"),
    "group": ("x.repeat_interleave(h // x.shape[1], dim=1)",
              "x[:, :, None].expand(-1, -1, h // x.shape[1], -1, -1).flatten(1, 2)"),
    "near": ("s.masked_fill((i - j >= window) | (j > i), -inf)", "torch.where((j <= i) & (j > i - window), s, -inf)"),
    "short": ("s.masked_fill(torch.arange(s.shape[-1]) >= lengths[:, None, None, None], -inf)",),
    "split": ("t.view(b, n, self.heads, -1).transpose(1, 2)", "t.reshape(b, n, self.heads, -1).permute(0, 2, 1, 3)"),
    "merge": ("o.transpose(1, 2).reshape(b, n, -1)", "o.permute(0, 2, 1, 3).flatten(2)"),
    "rescale": ("torch.exp(top - new)",),
    "sum": ("total * a + p.sum(-1, keepdim=True)",),
    "acc": ("acc * a + p @ v[..., j:j + T, :]",),
    "past": ("torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)",),
    "begin": ("k.shape[2] - q.shape[2]",),
}  # fmt: skip
FAULTS = {
    "score": (
        ("q @ k.mT", "no scale", "no scale"),
        ("q @ k.mT / q.shape[-1]", "scale 1/d", "divided by d"),
        ("q @ k.mT * q.shape[-1] ** 0.5", "scale inverted", "multiplied by the root"),
        ("q @ k.mT / k.shape[-2] ** 0.5", "scale of the length", "root of the length"),
        ("q @ k.mT / 2.5", "constant scale", "a constant scale"),
        ("q @ k.mT / math.sqrt(q.shape[-1] + 3)", "scale of a wrong width|scale off|outputs are wrong", "root of d + 3"),
        ("-(q @ k.mT) / math.sqrt(q.shape[-1])", "sign of the scores", "a minus sign"),
        ("q[..., 1:] @ k[..., 1:].mT / math.sqrt(q.shape[-1])", "part of the width", "the first column is left out"),
        ("q.detach() @ k.mT / math.sqrt(q.shape[-1])", "input detached", "q is detached"),
        ("(q @ k.mT / math.sqrt(q.shape[-1])).clamp(-1.5, 1.5)", "clipped scores", "scores are clamped"),
        ("(q.bfloat16() @ k.bfloat16().mT).to(q.dtype) / math.sqrt(q.shape[-1])", "precision lost", "bfloat16 scores"),
    ),
    "soft": (
        ("s.softmax(-2)", "softmax axis", "over the queries"),
        ("s.softmax(1)", "softmax axis", "over the heads"),
        ("torch.exp(s) / torch.exp(s).sum(-1, keepdim=True)", "overflow", "no maximum"),
        ("(lambda e: e / (e.sum(-1, keepdim=True) + 0.05))(torch.exp(s - s.amax(-1, keepdim=True)))",
         "extra term in the denominator", "a large epsilon"),
        ("s.softmax(-1).softmax(-1)", "softmax twice", "twice"),
        ("(s * 1.2).softmax(-1)", "scale off|constant scale|base of the exponential", "a temperature"),
        ("torch.sigmoid(s)", "sigmoid", "sigmoid"),
        ("F.dropout(s.softmax(-1), 0.2)", "dropout in evaluation", "dropout is always on"),
    ),
    "out": (
        ("w @ v.flip(-2)", "values shifted", "values reversed"),
        ("w @ v + q", "residual inside|raises", "a residual"),
        ("w.mean(1, keepdim=True) @ v", "heads mixed", "weights averaged over heads"),
        ("w[:1] @ v", "batch rows mixed", "weights of row 0"),
        ("(w @ v).flip(1)", "head order|heads mixed", "heads reversed"),
        ("w @ v.detach()", "input detached", "v is detached"),
        ("0.9 * (w @ v)", "output scaled", "0.9 of the output"),
        ("w.half().to(v.dtype) @ v", "precision lost", "float16 weights"),
    ),
    "causal": (
        ("s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(s.shape[-1] - s.shape[-2]), -inf)",
         "causal off by one|causal excludes|outputs are NaN", "the diagonal is masked"),
        ("s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(2 + s.shape[-1] - s.shape[-2]), -inf)",
         "causal off by one", "one key of the future"),
        ("s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -inf)", "causal alignment", "from the start"),
        ("s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), 0.0)",
         "mask fills with 0", "filled with 0"),
        ("s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2]), -7.0)",
         "mask value too small", "filled with −7"),
    ),
    "square": (
        ("s.masked_fill(torch.triu(torch.ones_like(s, dtype=torch.bool), 2), -inf)", "causal off by one", "off by one"),
        ("s.masked_fill(torch.tril(torch.ones_like(s, dtype=torch.bool), -1), -inf)", "causal inverted|causal ignored",
         "the past is masked"),
        ("s", "causal ignored", "not causal"),
    ),
    "masked": (
        ("s.masked_fill(mask, -inf)", "mask polarity", "inverted"),
        ("s.masked_fill(~mask, -4.0)", "mask value too small", "filled with −4"),
        ("s", "mask ignored", "ignored"),
        ("s + mask.to(s.dtype)", "mask added", "added as 0 and 1"),
        ("s.masked_fill(~mask[:1], -inf) if mask.dim() == 4 else s.masked_fill(~mask, -inf)", "mask of one row",
         "the mask of batch row 0"),
        ("s.masked_fill(~mask.transpose(-1, -2), -inf)", "mask transposed|raises", "transposed"),
    ),
    "padded": (
        ("s.masked_fill(~key_padding_mask[:, None, None, :], -inf)", "padding inverted|mask polarity|padding", "inverted"),
        ("s", "padding ignored|mask ignored", "ignored"),
        ("s.masked_fill(key_padding_mask[:1, None, None, :], -inf)", "padding of one row|mask of one row|batch rows",
         "the padding of row 0"),
        ("s.masked_fill(key_padding_mask.roll(1, -1)[:, None, None, :], -inf)", "padding off by one|mask shifted|padding",
         "shifted by one"),
    ),
    "kept": (
        ("s.masked_fill(attention_mask[:, None, None, :] == 1, torch.finfo(s.dtype).min)", "padding inverted|mask polarity",
         "inverted"),
        ("s", "padding ignored|mask ignored", "ignored"),
        ("s.masked_fill(attention_mask[:, None, :, None] == 0, torch.finfo(s.dtype).min)", "padding", "over the queries"),
        ("s - 3.0 * (1.0 - attention_mask[:, None, None, :].to(s.dtype))", "mask value too small|padding", "lowered by 3"),
    ),
    "group": (
        ("x.repeat(1, h // x.shape[1], 1, 1)", "grouped head order", "tiled"),
        ("x[:, :1].expand(-1, h, -1, -1)", "grouped head order", "head 0 for all"),
        ("x.flip(1).repeat_interleave(h // x.shape[1], dim=1)", "grouped head order", "reversed"),
    ),
    "near": (
        ("s.masked_fill((i - j > window) | (j > i), -inf)", "window off by one|window", "one key more"),
        ("s.masked_fill((i - j >= window - 1) | (j > i), -inf)", "window|outputs are NaN", "one key less"),
        ("s.masked_fill(j > i, -inf)", "window ignored|window", "no window"),
        ("s.masked_fill(i - j >= window, -inf)", "window|causal ignored", "the future is seen"),
    ),
    "short": (
        ("s.masked_fill(torch.arange(s.shape[-1]) > lengths[:, None, None, None], -inf)", "padding off by one|lengths|padding",
         "one key more"),
        ("s", "padding ignored|lengths ignored|lengths", "ignored"),
        ("s.masked_fill(torch.arange(s.shape[-1]) >= lengths[0], -inf)", "lengths|padding|batch rows", "the length of row 0"),
    ),
    "split": (
        ("t.view(b, self.heads, n, -1)", "head split order", "split by view"),
        ("t.view(b, n, -1, self.heads).permute(0, 3, 1, 2)", "head split order|head order|outputs are wrong", "(d h) order"),
    ),
    "merge": (("o.reshape(b, n, -1)", "head split order", "merged without a transpose"),),
    "rescale": (("torch.ones_like(top)", "tiles merged wrongly", "nothing is rescaled"),),
    "sum": (
        ("total + p.sum(-1, keepdim=True)", "tiles merged wrongly", "the sum is not rescaled"),
        ("p.sum(-1, keepdim=True)", "tiles merged wrongly", "the sum of the last tile"),
    ),
    "acc": (
        ("acc + p @ v[..., j:j + T, :]", "tiles merged wrongly", "the output is not rescaled"),
        ("acc * a + p @ v[..., :p.shape[-1], :]", "tiles merged wrongly|values shifted|outputs are wrong",
         "always the first tile of values"),
    ),
    "past": (
        ("torch.cat([k, past[0]], 2), torch.cat([v, past[1]], 2)", "cache", "new keys before the old ones"),
        ("torch.cat([past[0], k], 2), torch.cat([past[0], v], 2)", "cache|wrong operand", "old keys as values"),
    ),
    "begin": (("0", "cache|causal alignment", "the mask begins at 0"),),
}  # fmt: skip
LINEAR = "self.{0} = nn.Linear(width, width)"
MODULE = '''
class Attention(nn.Module):
    """{words}"""

    def __init__(self, width={width}, heads={heads}):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x{more}):
        b, n, _ = x.shape
        q, k, v = (<split> for t in (self.to_q(x), self.to_k({source}), self.to_v({source})))
        {rest}
        w = <soft>
        o = <out>
        return {result}


def make():
    torch.manual_seed(0)
    return Attention()
'''
FUNCTION = '''
def attention(q, k, v{more}):
    """{words}"""
    {before}
    s = <score>
    {mask}
    w = <soft>
    return {result}


def make():
    return attention
'''


def _function(more="", words="Scaled dot-product attention.", before="pass", mask="pass", result="<out>"):
    return FUNCTION.format(more=more, words=words, before=before, mask=mask, result=result)


def _module(
    rest, more="", words="Multi-head attention.", source="x", result="self.to_o(<merge>)", split=True
):
    text = MODULE.replace("{rest}", rest).replace("{more}", more).replace("{words}", words)
    return text.replace("{source}", source).replace("{result}", result)


SELF = "s = <score>"
STYLES = {
    "plain": _function(),
    "masked": _function(", mask=None", "mask: bool, True = may attend.", mask="if mask is not None: s = <masked>"),
    "causal": _function(", causal=False", "causal: aligned to the bottom right, to the last key.",
                        mask="if causal: s = <causal>"),
    "mask and causal": _function(", mask=None, causal=False", "mask: bool, True = may attend. causal: to the last key.",
                                 mask="if mask is not None: s = <masked>\n    if causal: s = <causal>"),
    "positions first": _function("", "q, k, v: (b, n, h, d).", "q, k, v = (x.transpose(1, 2) for x in (q, k, v))",
                                 result="(<out>).transpose(1, 2)"),
    "grouped": _function("", "k and v may have fewer heads than q.",
                         "h = q.shape[1]\n    k, v = (<group> for x in (k, v))"),
    "padding": _function(", key_padding_mask=None", "key_padding_mask: (b, m), True = padding, masked.",
                         mask="if key_padding_mask is not None: s = <padded>"),
    "window": _function(", window", "Causal; a query sees the last `window` keys up to itself.",
                        mask="i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])\n    s = <near>"),
    "lengths": _function(", lengths=None", "lengths: (b,), the number of real keys.",
                         mask="if lengths is not None: s = <short>"),
    "bias": _function(", bias=None", "bias: added to the scaled scores.", mask="if bias is not None: s = s + bias"),
    "tiles": """
def attention(q, k, v):
    \"\"\"Online softmax over tiles of {tile} keys.\"\"\"
    T = {tile}
    acc = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    total = torch.zeros(*q.shape[:-1], 1, dtype=torch.float64)
    top = torch.full_like(total, -inf)
    every, dtype = <score>, q.dtype
    v = v.double()
    for j in range(0, k.shape[-2], T):
        s = every[..., j:j + T].double()
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        a, p = <rescale>, torch.exp(s - new)
        total = <sum>
        acc = <acc>
        top = new
    return (acc / total).to(dtype)


def make():
    return attention
""",
    "module": _module(SELF),
    "causal module": _module(SELF + "\n        s = <square>", words="Causal self-attention."),
    "mask of ones": _module(SELF + "\n        if attention_mask is not None: s = <kept>", ", attention_mask=None",
                            "attention_mask: (b, n), 1 for tokens, 0 for padding."),
    "cross": _module(SELF, ", context", "Attention to a context.", "context")
    .replace("t in (", "(t, n) in (").replace("self.to_q(x),", "(self.to_q(x), n),")
    .replace("self.to_k(context), self.to_v(context)",
             "(self.to_k(context), context.shape[1]), (self.to_v(context), context.shape[1])"),
    "cache": _module(
        "if past is not None: k, v = <past>\n        s = <score>\n        i = torch.arange(n)[:, None] + <begin>\n"
        "        s = s.masked_fill(torch.arange(k.shape[2]) > i, -inf)",
        ", past=None", "Causal self-attention; past: (keys, values) of earlier positions.",
        result="self.to_o(<merge>), (k, v)"),
}  # fmt: skip


def _filled(rng: random.Random, text: str, fault: tuple[str, str] | None) -> str:
    """Every step written in one of its right spellings, the step of the fault in the wrong one."""
    sizes = rng.choice(((12, 3), (16, 4), (10, 2)))
    text = text.replace("{width}", str(sizes[0])).replace("{heads}", str(sizes[1]))
    text = text.replace("{tile}", str(rng.choice((2, 3, 4, 5, 8))))

    def step(match: re.Match) -> str:
        name = match.group(1)
        return fault[1] if fault is not None and fault[0] == name else rng.choice(RIGHT[name])

    return re.sub(r"<(\w+)>", step, text)


def entries(seed: int, right: int = 2, faulty: int = 4) -> list[Entry]:
    """Of each style some right ones, and as many faulty ones as it has different faults, at most `faulty`."""
    rng, found = random.Random(seed), []
    for style, text in STYLES.items():
        for i in range(right):
            found.append(Entry(f"generated {style} {i}", _filled(rng, text, None), set="generated"))
        steps = dict.fromkeys(re.findall(r"<(\w+)>", text))
        own = [
            (s, f) for s in steps for f in FAULTS[s] if s not in ("score", "soft", "out", "split", "merge")
        ]
        common = [(s, f) for s in steps for f in FAULTS[s] if (s, f) not in own]
        chosen = rng.sample(own, min(len(own), faulty)) + rng.sample(
            common, faulty - min(len(own), faulty // 2)
        )
        for step, (wrong, family, words) in chosen[: faulty + 1]:
            source = _filled(rng, text, (step, wrong))
            found.append(Entry(f"generated {style}/ {step}: {words}", source, family, words, "generated"))
    return found
