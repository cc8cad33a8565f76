"""The faults: a description, the law that must report it, and the replacement that causes it."""

from faults.fault import Fault

SOFTMAX = "weights = scores.softmax(-1).masked_fill(~visible, 0.0)"
SAFE = ".masked_fill(~nonempty, 0.0)\n"
FACTOR = "    factor = d**-0.5 if scale is None else scale\n    scores = (factor * q) @ k.mT\n"
SCORES = "scores = (factor * q) @ k.mT"
HIDDEN = (
    "        k, v = zero_padding(k, lengths), zero_padding(v, lengths)\n" + FACTOR.partition(" = (factor")[0]
)
SHARED = f"    k, v = repeat_heads(k, h), repeat_heads(v, h)\n    if lengths is not None:\n{HIDDEN}"
O = "    o = weights @ v\n"
LSE = "return o, scores.logsumexp(-1).masked_fill(~nonempty[..., 0], -inf)"


ONCE = """class Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, v):
        ctx.save_for_backward(weights, v)
        return weights @ v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        weights, v = ctx.saved_tensors
        return g @ v.mT, weights.mT @ g


"""


def _attention(name: str, law: str, old: str, new: str, *also: tuple[str, str]) -> Fault:
    return Fault(name, law, "attention", old, new, also)


WEIGHTS = (
    _attention("softmax over the queries", "L01", "scores.softmax(-1).mask", "scores.softmax(-2).mask"),
    _attention("1/d in place of 1/√d", "L06", FACTOR, FACTOR.replace("d**-0.5", "1 / d")),
    _attention("no scale", "L06", FACTOR, FACTOR.replace("d**-0.5 if", "1.0 if")),
    _attention("√d in place of 1/√d", "L06", FACTOR, FACTOR.replace("d**-0.5", "d**0.5")),
    _attention("1/√m in place of 1/√d", "L06", FACTOR, FACTOR.replace("d**-0.5", "m**-0.5")),
    _attention(
        "scale ignored", "L13", FACTOR, FACTOR.replace("d**-0.5 if scale is None else scale", "d**-0.5")
    ),
    _attention(
        "scale applied on top of 1/√d", "L03", FACTOR, FACTOR.replace("else scale", "else scale * d**-0.5")
    ),
    _attention("not normalized", "L01", SOFTMAX, "weights = scores.exp().masked_fill(~visible, 0.0)"),
    _attention(
        "the largest score is not subtracted: overflow",
        "L01",
        SOFTMAX,
        "weights = (scores.exp() / scores.exp().sum(-1, keepdim=True)).masked_fill(~visible, 0.0)",
    ),
    _attention(
        "one more in the denominator",
        "L01",
        SOFTMAX,
        SOFTMAX + "\n    weights = weights / (1 + (-scores.logsumexp(-1, keepdim=True)).exp())",
    ),
    _attention(
        "sigmoid in place of softmax", "L01", SOFTMAX, "weights = scores.sigmoid().masked_fill(~visible, 0.0)"
    ),
    _attention(
        "small weights set to 0",
        "L01",
        SOFTMAX,
        SOFTMAX + "\n    weights = weights.masked_fill(weights < 0.02, 0.0)",
    ),
    _attention("scores clamped", "L06", SCORES, "scores = ((factor * q) @ k.mT).clamp(-2, 2)"),
    _attention("values reversed", "L06", O, "    o = weights @ v.flip(-2)\n"),
    _attention("the mean of the values added", "L02", O, "    o = weights @ v + v.mean(-2, keepdim=True)\n"),
    _attention("head 0 used for all heads", "L06", O, "    o = weights[:, :1] @ v\n"),
    _attention(
        "a random part in every call",
        "P05",
        O,
        "    o = weights @ v * (1 + 1e-9 * torch.randn((), dtype=q.dtype))\n",
    ),
    _attention(
        "float64 computed in float32",
        "P09",
        SCORES,
        "scores = ((factor * q).float() @ k.float().mT).to(q.dtype)",
    ),
    _attention(
        "wrong only in float32", "L60", O, O + "    o = o * 1.01 if o.dtype == torch.float32 else o\n"
    ),
    _attention("overflow of unscaled scores in float16", "P11", SCORES, "scores = factor * (q @ k.mT)"),
    _attention(
        "16-bit weights summed in 16 bits",
        "L60",
        SOFTMAX,
        SOFTMAX + "\n    weights = weights.to(torch.bfloat16).to(q.dtype)",
    ),
)

MASKS = (
    _attention("mask inverted", "L45", "visible = visible & allowed", "visible = visible & ~allowed"),
    _attention("mask ignored", "L45", "visible = visible & allowed", "visible = visible"),
    _attention(
        "mask of one head used for all heads",
        "L34",
        "visible = visible & allowed",
        "visible = visible & (allowed[:, :1] if allowed.dim() == 4 else allowed)",
    ),
    _attention(
        "mask read along the wrong axis where n = m",
        "L45",
        "visible = visible & allowed",
        "visible = visible & (allowed.mT if n == m else allowed)",
    ),
    _attention("causal: excludes the query itself", "L58", "(j <= i)", "(j < i)"),
    _attention("causal: one ahead", "L29", "(j <= i)", "(j <= i + 1)"),
    _attention("causal from the wrong corner", "L58", "(j <= i)", "(j <= i - m + n)"),
    _attention(
        "causal only where n = m",
        "L58",
        "    if causal:\n        visible",
        "    if causal and n == m:\n        visible",
    ),
    _attention("causal reversed", "L29", "(j <= i)", "(j >= i)"),
    _attention("window one key too narrow", "L59", "(i - j <= before)", "(i - j < before)"),
    _attention("window one key too wide", "L59", "(i - j <= before)", "(i - j <= before + 1)"),
    _attention("window ignores `after`", "L59", " & (j - i <= after)", ""),
    _attention("window read as (after, before)", "L59", "before, after = window", "after, before = window"),
    _attention(
        "mask ignored if causal is set",
        "P10",
        "    if allowed is not None:\n        visible",
        "    if allowed is not None and not causal:\n        visible",
    ),
    _attention(
        "documents leak by one token",
        "L47",
        "documents[:, None, None, :])",
        "documents.roll(-1, -1)[:, None, None, :])",
    ),
    _attention(
        "documents of row 0 used for all rows",
        "L47",
        "(documents[:, None, :, None]",
        "(documents[:1, None, :, None]",
    ),
    _attention(
        "documents ignored",
        "L47",
        "    if documents is not None:\n        visible",
        "    if False:\n        visible",
    ),
    _attention(
        "NaN on an empty row", "P03", SOFTMAX, "weights = scores.masked_fill(~visible, -inf).softmax(-1)"
    ),
    _attention(
        "uniform weights over masked keys on an empty row", "P03", SOFTMAX, "weights = scores.softmax(-1)"
    ),
    _attention(
        "finfo.min in place of −∞",
        "P03",
        "scores = scores.masked_fill(~visible, -inf)" + SAFE,
        "scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)\n",
        (SOFTMAX, "weights = scores.softmax(-1)"),
    ),
    _attention(
        "−10 in place of −∞",
        "L01",
        "scores = scores.masked_fill(~visible, -inf)" + SAFE,
        "scores = scores.masked_fill(~visible, -10.0)\n",
        (SOFTMAX, "weights = scores.softmax(-1)"),
    ),
    _attention(
        "a mask of −∞ times its complement",
        "L45",
        "scores = scores.masked_fill(~visible, -inf)" + SAFE,
        "scores = scores + (~visible).to(scores.dtype) * -inf\n",
    ),
    _attention(
        "the mask multiplies the weights after softmax",
        "L01",
        "scores = scores.masked_fill(~visible, -inf)" + SAFE,
        "scores = scores\n",
    ),
    _attention(
        "last key dropped where m is odd",
        "L06",
        "    return visible\n\n\ndef tiled",
        "    visible[..., -1] &= m == 1 or m % 2 == 0\n    return visible\n\n\ndef tiled",
    ),
    _attention(
        "mask cached by length",
        "L62",
        "    nonempty = visible.any",
        "    visible = CACHE.setdefault((n, m, visible.shape), visible)\n    nonempty = visible.any",
    ),
)

PADDING = (
    _attention(
        "padding leaks into the keys by one",
        "L31",
        "(j < lengths[:, None, None, None])",
        "(j <= lengths[:, None, None, None])",
    ),
    _attention(
        "padding counted as keys of score 0",
        "L31",
        "    if lengths is not None:\n        visible",
        "    if False:\n        visible",
    ),
    _attention(
        "NaN in padded values",
        "P02",
        HIDDEN,
        HIDDEN.replace("zero_padding(v, lengths)", "v"),
    ),
    _attention(
        "NaN in padded keys",
        "P02",
        HIDDEN,
        HIDDEN.replace("zero_padding(k, lengths)", "k"),
    ),
    _attention(
        "padding leaks only into gradients",
        "L31",
        SHARED,
        "    leak = v.sum(-2, keepdim=True).sum(1, keepdim=True)\n" + SHARED,
        (O, O + "    o = o + (leak - leak.detach())\n"),
    ),
    _attention(
        "lengths of row 0 used for all rows",
        "L31",
        "(j < lengths[:, None, None, None])",
        "(j < lengths[:1, None, None, None])",
    ),
)

GRADIENTS = (
    _attention("q detached", "L50", SCORES, "scores = (factor * q.detach()) @ k.mT"),
    _attention("k detached", "L50", SCORES, "scores = (factor * q) @ k.detach().mT"),
    _attention("v detached", "L50", O, "    o = weights @ v.detach()\n"),
    _attention(
        "gradient of the bias missing", "L50", "scores = scores + bias", "scores = scores + bias.detach()"
    ),
    _attention("gradient through the weights missing", "L06", O, "    o = weights.detach() @ v\n"),
    _attention(
        "no gradient through log-sum-exp", "L53", LSE, LSE.replace("scores.log", "scores.detach().log")
    ),
    _attention("gradient doubled", "L06", O, "    o = weights @ v\n    o = 2 * o - o.detach()\n"),
    _attention(
        "gradients of batch rows mixed",
        "L48",
        O,
        O + "    o = o + (o.sum(0, keepdim=True) - o.sum(0, keepdim=True).detach())\n",
    ),
    _attention(
        "no second derivative",
        "P04",
        O,
        "    o = Mix.apply(weights, v)\n",
        ("def repeat_heads(", ONCE + "def repeat_heads("),
    ),
)

SHAPES = (
    _attention(
        "grouped heads mapped wrongly",
        "L51",
        "x.repeat_interleave(heads // x.shape[1], 1)",
        "x.repeat(1, heads // x.shape[1], 1, 1)",
    ),
    _attention(
        "all heads read key/value head 0",
        "L51",
        "x.repeat_interleave(heads // x.shape[1], 1)",
        "x[:, :1].expand(-1, heads, -1, -1)",
    ),
    _attention(
        "wrong for a single query",
        "L06",
        O,
        O + "    o = v.mean(-2, keepdim=True).expand_as(o) if n == 1 < m else o\n",
    ),
    _attention(
        "wrong only where n ≠ m", "P07", SCORES, SCORES + "\n    scores = scores if n == m else scores * 0.9"
    ),
    _attention("wrong only where d_v ≠ d_k", "P08", O, O + "    o = o if v.shape[-1] == d else o * 0.9\n"),
    _attention(
        "keys of row 0 used for the whole batch",
        "L48",
        SHARED,
        SHARED.replace("    if", "    k = k[:1].expand_as(k)\n    if", 1),
    ),
    _attention(
        "wrong only in a batch", "L48", O, O + "    o = o if b == 1 else (o + o.mean(0, keepdim=True)) / 2\n"
    ),
    _attention(
        "strides ignored",
        "L57",
        SCORES,
        "q = q.as_strided(q.shape, torch.empty(q.shape).stride())\n    " + SCORES,
    ),
    _attention(
        "the input is modified",
        "L62",
        SCORES,
        "with torch.no_grad():\n        q.mul_(factor)\n    scores = q @ k.mT",
    ),
    _attention(
        "the output depends on the previous call",
        "L62",
        O,
        O + "    o = o + 0.1 * CACHE.get('mean', 0.0)\n    CACHE['mean'] = o.detach().mean()\n",
    ),
)

BIASES = (
    _attention(
        "bias added after softmax",
        "L45",
        "    if bias is not None:\n        scores = scores + bias\n",
        "",
        (
            SOFTMAX,
            SOFTMAX
            + "\n    weights = weights if bias is None else weights + bias.masked_fill(bias == -inf, 0.0)",
        ),
    ),
    _attention("bias ignored", "L45", "scores = scores + bias", "scores = scores"),
    _attention(
        "bias scaled with the scores", "L45", "scores = scores + bias", "scores = scores + factor * bias"
    ),
    _attention(
        "bias of one head used for all heads",
        "L45",
        "scores = scores + bias",
        "scores = scores + (bias[:, :1] if bias.dim() == 4 else bias)",
    ),
    _attention("log-sum-exp off by ln 2", "L53", LSE, LSE.replace("(-1)", "(-1).add(0.6931471805599453)", 1)),
    _attention("log-sum-exp to base 2", "L53", LSE, LSE.replace("(-1)", "(-1).div(0.6931471805599453)", 1)),
    _attention(
        "log-sum-exp over all keys, masked ones included",
        "L54",
        LSE,
        LSE.replace("scores.log", "((factor * q) @ k.mT).log"),
    ),
)

OPTION_PAIRS = (
    _attention(
        "lengths ignored if causal is given",
        "L64",
        "    if lengths is not None:\n        visible",
        "    if lengths is not None and not causal:\n        visible",
    ),
    _attention(
        "causal ignored if lengths is given",
        "L64",
        "    if causal:\n        visible",
        "    if causal and lengths is None:\n        visible",
    ),
    _attention(
        "documents ignored if causal is given",
        "L64",
        "    if documents is not None:\n        visible",
        "    if documents is not None and not causal:\n        visible",
    ),
    _attention(
        "causal ignored if documents is given",
        "L64",
        "    if causal:\n        visible",
        "    if causal and documents is None:\n        visible",
    ),
    _attention(
        "window ignored if causal is given",
        "L64",
        "    if window is not None:\n        before",
        "    if window is not None and not causal:\n        before",
    ),
    _attention(
        "bias ignored if causal is given",
        "L64",
        "    if bias is not None:\n        scores",
        "    if bias is not None and not causal:\n        scores",
    ),
    _attention(
        "mask ignored if lengths is given",
        "L64",
        "    if allowed is not None:\n        visible",
        "    if allowed is not None and lengths is None:\n        visible",
    ),
    _attention(
        "scale ignored if causal is given",
        "L64",
        FACTOR,
        FACTOR.replace("if scale is None", "if scale is None or causal"),
    ),
    _attention(
        "log-sum-exp without the bias",
        "L64",
        LSE,
        LSE.replace("scores.log", "(scores - (0 if bias is None else bias)).log"),
    ),
)

TILES = (
    Fault(
        "denominator not rescaled from tile to tile",
        "L61",
        "tiled",
        "denominator = denominator * rescale + new.sum(-1)",
        "denominator = denominator + new.sum(-1)",
    ),
    Fault(
        "numerator not rescaled",
        "L61",
        "tiled",
        "numerator = numerator * rescale[..., None] +",
        "numerator = numerator +",
    ),
    Fault(
        "the last, partial tile skipped",
        "L61",
        "tiled",
        "range(0, m, tile)",
        "range(0, m if m <= tile else m // tile * tile, tile)",
    ),
    Fault(
        "mask ignored past key 128",
        "L61",
        "tiled",
        "~visible[..., start:end]",
        "~(visible[..., start:end] | (start >= 128))",
    ),
    Fault(
        "tiles overlap by a key",
        "L61",
        "tiled",
        "end = min(start + tile, m)",
        "end = min(start + tile + 1, m)",
    ),
    Fault(
        "queries past 128 reversed",
        "L61",
        "tiled",
        "    o = numerator /",
        "    numerator[..., 128:, :] = numerator[..., 128:, :].flip(-2)\n    o = numerator /",
    ),
    Fault(
        "overlap counted twice",
        "L54",
        "in_parts",
        "((0, half), (half, m))",
        "((0, half), (max(half - 1, 0), m))",
    ),
    Fault(
        "parts merged without their weights",
        "L54",
        "in_parts",
        "factors = (logs - largest).exp()",
        "factors = ((logs - largest) > -inf).to(q.dtype)",
    ),
    Fault(
        "merged parts lose the gradient of their weights",
        "L53",
        "in_parts",
        "factors = (logs - largest).exp()",
        "factors = (logs - largest).detach().exp()",
    ),
)

MODULES = (
    Fault(
        "heads split in another order",
        "L06",
        "module",
        "return x.unflatten(-1, (-1, self.d_k)).transpose(1, 2)",
        "return x.unflatten(-1, (self.d_k, -1)).movedim(-1, 1)",
    ),
    Fault(
        "rows of W_O permuted",
        "L06",
        "module",
        "return o.transpose(1, 2).flatten(2)",
        "return o.permute(0, 2, 3, 1).flatten(2)",
    ),
    Fault(
        "heads reversed before W_O",
        "L06",
        "module",
        "self.w_o(self.join(o))",
        "self.w_o(self.join(o.flip(1)))",
    ),
    Fault(
        "keys computed with the matrix of the values",
        "L06",
        "module",
        "self.split(self.w_k(source))",
        "self.split(self.w_v(source))",
    ),
    Fault(
        "a matrix that is not used",
        "L50",
        "module",
        "self.split(self.w_k(source))",
        "self.split(self.w_v(source))",
    ),
    Fault("lengths not passed on", "L31", "module", "lengths=lengths, documents", "documents"),
    Fault("documents not passed on", "L47", "module", ", documents=documents)", ")"),
    Fault("mask not passed on", "L34", "module", "allowed=allowed, causal", "causal"),
    Fault(
        "dropout active in evaluation",
        "L56",
        "module with dropout",
        "self.dropout, self.training",
        "self.dropout, True",
    ),
    Fault(
        "normalized over the batch",
        "L48",
        "module",
        "return self.w_o(self.join(o))",
        "return self.w_o(self.join(o - o.mean(0, keepdim=True)))",
    ),
    Fault(
        "cache overwritten across the batch",
        "L33",
        "causal module",
        'cache["k"], cache["v"] = k, v',
        'cache["k"], cache["v"] = k[:1].expand_as(k), v[:1].expand_as(v)',
    ),
    Fault(
        "cache keeps only the newest keys",
        "L33",
        "causal module",
        'cache["k"], cache["v"] = k, v',
        'cache["k"], cache["v"] = k[:, :, -3:], v[:, :, -3:]',
    ),
    Fault(
        "cache positions restarted",
        "L33",
        "rotary module",
        'start = shift if not cache else cache["k"].shape[2]',
        "start = shift",
    ),
    Fault(
        "cache positions one too far",
        "L33",
        "rotary module",
        'start = shift if not cache else cache["k"].shape[2]',
        'start = shift if not cache else cache["k"].shape[2] + 1',
    ),
    Fault(
        "only queries are rotated",
        "L23",
        "rotary module",
        "q, k = rotate(q, start), rotate(k, start)",
        "q, k = rotate(q, start), k",
    ),
)

MODELS = (
    Fault(
        "the second layer is not causal",
        "L29",
        "decoder",
        "range(layers))",
        "range(layers))\n        self.blocks[-1].attention.causal = False",
    ),
    Fault(
        "a norm over all positions",
        "L29",
        "decoder",
        "self.head(self.norm(x))",
        "self.head(self.norm(x - x.mean(1, keepdim=True)))",
    ),
    Fault(
        "positions restarted at each step",
        "L33",
        "decoder",
        'start = 0 if not cache else cache["filled"]',
        "start = 0",
    ),
    Fault(
        "no causal mask where there is a cache",
        "L52",
        "causal module",
        "causal=self.causal",
        "causal=self.causal and cache is None",
    ),
    Fault(
        "padding masked only in the first layer",
        "L31",
        "encoder",
        "x = block(x, lengths=lengths,",
        "x = block(x, lengths=lengths if i == 0 else None,",
    ),
    Fault(
        "a mean over all positions, padding included",
        "L31",
        "encoder",
        "self.head(self.norm(x))",
        "self.head(self.norm(x + x.mean(1, keepdim=True)))",
    ),
    Fault(
        "the largest length used for all rows",
        "L31",
        "encoder",
        "x = block(x, lengths=lengths,",
        "x = block(x, lengths=None if lengths is None else lengths.max().expand_as(lengths),",
    ),
    Fault(
        "positions detached",
        "L50",
        "encoder",
        "self.positions(torch.arange(start, start + ids.shape[1]))",
        "self.positions(torch.arange(start, start + ids.shape[1])).detach()",
    ),
    Fault("documents not passed on to the blocks", "L47", "decoder", "documents=documents, cache", "cache"),
)

FAULTS = (*WEIGHTS, *MASKS, *PADDING, *GRADIENTS, *SHAPES, *BIASES, *OPTION_PAIRS, *TILES, *MODULES, *MODELS)
