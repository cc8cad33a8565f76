"""The faults: what went wrong, the law that must say so, and the words that do it."""

from faults.fault import Fault

PLAIN = "weights = scores.softmax(-1).masked_fill(~seen, 0.0)"
SAFE = ".masked_fill(~somewhere, 0.0)\n"
FACTOR = "    factor = d**-0.5 if scale is None else scale\n    scores = (factor * q) @ k.mT\n"
SCORES = "scores = (factor * q) @ k.mT"
HIDDEN = "        k, v = hide(k, lengths), hide(v, lengths)\n" + FACTOR.partition(" = (factor")[0]
SHARED = f"    k, v = share(k, h), share(v, h)\n    if lengths is not None:\n{HIDDEN}"
O = "    o = weights @ v\n"
LSE = "return o, scores.logsumexp(-1).masked_fill(~somewhere[..., 0], -inf)"


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


def _plain(said: str, law: str, old: str, new: str, *also: tuple[str, str]) -> Fault:
    return Fault(said, law, "attention", old, new, also)


WEIGHTS = (
    _plain("softmax over the queries", "L01", "scores.softmax(-1).mask", "scores.softmax(-2).mask"),
    _plain("1/d in place of 1/√d", "L06", FACTOR, FACTOR.replace("d**-0.5", "1 / d")),
    _plain("no scale", "L06", FACTOR, FACTOR.replace("d**-0.5 if", "1.0 if")),
    _plain("√d in place of 1/√d", "L06", FACTOR, FACTOR.replace("d**-0.5", "d**0.5")),
    _plain("the scale of the keys' number", "L06", FACTOR, FACTOR.replace("d**-0.5", "m**-0.5")),
    _plain("β ignored", "L13", FACTOR, FACTOR.replace("d**-0.5 if scale is None else scale", "d**-0.5")),
    _plain("β on top of 1/√d", "L03", FACTOR, FACTOR.replace("else scale", "else scale * d**-0.5")),
    _plain("not normalised", "L01", PLAIN, "weights = scores.exp().masked_fill(~seen, 0.0)"),
    _plain(
        "no largest score taken off: overflow",
        "L01",
        PLAIN,
        "weights = (scores.exp() / scores.exp().sum(-1, keepdim=True)).masked_fill(~seen, 0.0)",
    ),
    _plain(
        "one more in the denominator",
        "L01",
        PLAIN,
        PLAIN + "\n    weights = weights / (1 + (-scores.logsumexp(-1, keepdim=True)).exp())",
    ),
    _plain("sigmoid in place of softmax", "L01", PLAIN, "weights = scores.sigmoid().masked_fill(~seen, 0.0)"),
    _plain(
        "small weights cut off without a word",
        "L01",
        PLAIN,
        PLAIN + "\n    weights = weights.masked_fill(weights < 0.02, 0.0)",
    ),
    _plain("scores clamped", "L06", SCORES, "scores = ((factor * q) @ k.mT).clamp(-2, 2)"),
    _plain("values turned round", "L06", O, "    o = weights @ v.flip(-2)\n"),
    _plain("the values' mean added", "L02", O, "    o = weights @ v + v.mean(-2, keepdim=True)\n"),
    _plain("head 0 used for all", "L06", O, "    o = weights[:, :1] @ v\n"),
    _plain(
        "a random part in every call",
        "P05",
        O,
        "    o = weights @ v * (1 + 1e-9 * torch.randn((), dtype=q.dtype))\n",
    ),
    _plain(
        "float64 computed in float32",
        "P09",
        SCORES,
        "scores = ((factor * q).float() @ k.float().mT).to(q.dtype)",
    ),
    _plain("wrong in float32 alone", "L60", O, O + "    o = o * 1.01 if o.dtype == torch.float32 else o\n"),
    _plain("overflow of unscaled scores in float16", "L60", SCORES, "scores = factor * (q @ k.mT)"),
    _plain(
        "16-bit weights summed in 16 bits",
        "L60",
        PLAIN,
        PLAIN + "\n    weights = weights.to(torch.bfloat16).to(q.dtype)",
    ),
)

MASKS = (
    _plain("mask polarity turned", "L45", "seen = seen & allowed", "seen = seen & ~allowed"),
    _plain("mask ignored", "L45", "seen = seen & allowed", "seen = seen"),
    _plain(
        "mask of one head used for all",
        "L34",
        "seen = seen & allowed",
        "seen = seen & (allowed[:, :1] if allowed.dim() == 4 else allowed)",
    ),
    _plain(
        "mask read along the wrong axis where n = m",
        "L45",
        "seen = seen & allowed",
        "seen = seen & (allowed.mT if n == m else allowed)",
    ),
    _plain("causal: not even itself", "L58", "(j <= i)", "(j < i)"),
    _plain("causal: one ahead", "L29", "(j <= i)", "(j <= i + 1)"),
    _plain("causal from the wrong corner", "L58", "(j <= i)", "(j <= i - m + n)"),
    _plain(
        "causal only where n = m",
        "L58",
        "    if causal:\n        seen",
        "    if causal and n == m:\n        seen",
    ),
    _plain("causal the other way round", "L29", "(j <= i)", "(j >= i)"),
    _plain("window one short", "L59", "(i - j <= before)", "(i - j < before)"),
    _plain("window one wide", "L59", "(i - j <= before)", "(i - j <= before + 1)"),
    _plain("window forgets what comes after", "L59", " & (j - i <= after)", ""),
    _plain("window read as (after, before)", "L59", "before, after = window", "after, before = window"),
    _plain(
        "a mask that is lost beside causal",
        "P10",
        "    if allowed is not None:\n        seen",
        "    if allowed is not None and not causal:\n        seen",
    ),
    _plain(
        "documents leak by one token",
        "L47",
        "documents[:, None, None, :])",
        "documents.roll(-1, -1)[:, None, None, :])",
    ),
    _plain(
        "documents of the first row used for all",
        "L47",
        "(documents[:, None, :, None]",
        "(documents[:1, None, :, None]",
    ),
    _plain(
        "documents ignored",
        "L47",
        "    if documents is not None:\n        seen",
        "    if False:\n        seen",
    ),
    _plain("NaN on an empty row", "P03", PLAIN, "weights = scores.masked_fill(~seen, -inf).softmax(-1)"),
    _plain("uniform over forbidden keys on an empty row", "P03", PLAIN, "weights = scores.softmax(-1)"),
    _plain(
        "finfo.min in place of −∞",
        "P03",
        "scores = scores.masked_fill(~seen, -inf)" + SAFE,
        "scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)\n",
        (PLAIN, "weights = scores.softmax(-1)"),
    ),
    _plain(
        "−10 in place of −∞",
        "L01",
        "scores = scores.masked_fill(~seen, -inf)" + SAFE,
        "scores = scores.masked_fill(~seen, -10.0)\n",
        (PLAIN, "weights = scores.softmax(-1)"),
    ),
    _plain(
        "a mask of −∞ times its complement",
        "L45",
        "scores = scores.masked_fill(~seen, -inf)" + SAFE,
        "scores = scores + (~seen).to(scores.dtype) * -inf\n",
    ),
    _plain(
        "the mask multiplies the weights after softmax",
        "L01",
        "scores = scores.masked_fill(~seen, -inf)" + SAFE,
        "scores = scores\n",
    ),
    _plain(
        "last key dropped where m is odd",
        "L06",
        "    return seen\n\n\ndef tiled",
        "    seen[..., -1] &= m == 1 or m % 2 == 0\n    return seen\n\n\ndef tiled",
    ),
    _plain(
        "mask remembered by length",
        "L62",
        "    somewhere = seen.any",
        "    seen = KEPT.setdefault((n, m, seen.shape), seen)\n    somewhere = seen.any",
    ),
)

PADDING = (
    _plain(
        "padding leaks into the keys by one",
        "L31",
        "(j < lengths[:, None, None, None])",
        "(j <= lengths[:, None, None, None])",
    ),
    _plain(
        "padding counted as keys of score 0",
        "L31",
        "    if lengths is not None:\n        seen",
        "    if False:\n        seen",
    ),
    _plain(
        "NaN in padded values",
        "P02",
        HIDDEN,
        HIDDEN.replace("hide(v, lengths)", "v"),
    ),
    _plain(
        "NaN in padded keys",
        "P02",
        HIDDEN,
        HIDDEN.replace("hide(k, lengths)", "k"),
    ),
    _plain(
        "padding leaks into gradients alone",
        "L31",
        SHARED,
        "    leak = v.sum(-2, keepdim=True).sum(1, keepdim=True)\n" + SHARED,
        (O, O + "    o = o + (leak - leak.detach())\n"),
    ),
    _plain(
        "lengths of the first row used for all",
        "L31",
        "(j < lengths[:, None, None, None])",
        "(j < lengths[:1, None, None, None])",
    ),
)

GRADIENTS = (
    _plain("gradient cut on q", "L50", SCORES, "scores = (factor * q.detach()) @ k.mT"),
    _plain("gradient cut on k", "L50", SCORES, "scores = (factor * q) @ k.detach().mT"),
    _plain("gradient cut on v", "L50", O, "    o = weights @ v.detach()\n"),
    _plain(
        "gradient of the bias missing", "L50", "scores = scores + bias", "scores = scores + bias.detach()"
    ),
    _plain("gradient through the weights missing", "L06", O, "    o = weights.detach() @ v\n"),
    _plain("gradient of log-sum-exp dropped", "L53", LSE, LSE.replace("scores.log", "scores.detach().log")),
    _plain("gradient twice as large", "L06", O, "    o = weights @ v\n    o = 2 * o - o.detach()\n"),
    _plain(
        "gradients of batch rows mixed",
        "L48",
        O,
        O + "    o = o + (o.sum(0, keepdim=True) - o.sum(0, keepdim=True).detach())\n",
    ),
    _plain(
        "no second derivative",
        "P04",
        O,
        "    o = Mix.apply(weights, v)\n",
        ("def share(", ONCE + "def share("),
    ),
)

SHAPES = (
    _plain(
        "grouped heads mapped wrongly",
        "L51",
        "x.repeat_interleave(heads // x.shape[1], 1)",
        "x.repeat(1, heads // x.shape[1], 1, 1)",
    ),
    _plain(
        "all heads read key/value head 0",
        "L51",
        "x.repeat_interleave(heads // x.shape[1], 1)",
        "x[:, :1].expand(-1, heads, -1, -1)",
    ),
    _plain(
        "wrong with one query alone",
        "L06",
        O,
        O + "    o = v.mean(-2, keepdim=True).expand_as(o) if n == 1 < m else o\n",
    ),
    _plain(
        "wrong where n ≠ m alone", "P07", SCORES, SCORES + "\n    scores = scores if n == m else scores * 0.9"
    ),
    _plain("wrong where d_v ≠ d_k alone", "P08", O, O + "    o = o if v.shape[-1] == d else o * 0.9\n"),
    _plain(
        "row 0 of the keys used for the whole batch",
        "L48",
        SHARED,
        SHARED.replace("    if", "    k = k[:1].expand_as(k)\n    if", 1),
    ),
    _plain(
        "wrong in a batch alone", "L48", O, O + "    o = o if b == 1 else (o + o.mean(0, keepdim=True)) / 2\n"
    ),
    _plain(
        "memory read as if it were contiguous",
        "L57",
        SCORES,
        "q = q.as_strided(q.shape, torch.empty(q.shape).stride())\n    " + SCORES,
    ),
    _plain(
        "the input is written to",
        "L62",
        SCORES,
        "with torch.no_grad():\n        q.mul_(factor)\n    scores = q @ k.mT",
    ),
    _plain(
        "what it gives depends on the last call",
        "L62",
        O,
        O + "    o = o + 0.1 * KEPT.get('mean', 0.0)\n    KEPT['mean'] = o.detach().mean()\n",
    ),
)

BIASES = (
    _plain(
        "bias added after softmax",
        "L45",
        "    if bias is not None:\n        scores = scores + bias\n",
        "",
        (
            PLAIN,
            PLAIN
            + "\n    weights = weights if bias is None else weights + bias.masked_fill(bias == -inf, 0.0)",
        ),
    ),
    _plain("bias ignored", "L45", "scores = scores + bias", "scores = scores"),
    _plain("bias scaled with the scores", "L45", "scores = scores + bias", "scores = scores + factor * bias"),
    _plain(
        "bias of one head used for all",
        "L45",
        "scores = scores + bias",
        "scores = scores + (bias[:, :1] if bias.dim() == 4 else bias)",
    ),
    _plain("log-sum-exp off by ln 2", "L53", LSE, LSE.replace("(-1)", "(-1).add(0.6931471805599453)", 1)),
    _plain("log-sum-exp to base 2", "L53", LSE, LSE.replace("(-1)", "(-1).div(0.6931471805599453)", 1)),
    _plain(
        "log-sum-exp of every key, hidden ones too",
        "L54",
        LSE,
        LSE.replace("scores.log", "((factor * q) @ k.mT).log"),
    ),
)

TOGETHER = (
    _plain(
        "lengths lost beside causal",
        "L64",
        "    if lengths is not None:\n        seen",
        "    if lengths is not None and not causal:\n        seen",
    ),
    _plain(
        "causal lost beside lengths",
        "L64",
        "    if causal:\n        seen",
        "    if causal and lengths is None:\n        seen",
    ),
    _plain(
        "documents lost beside causal",
        "L64",
        "    if documents is not None:\n        seen",
        "    if documents is not None and not causal:\n        seen",
    ),
    _plain(
        "causal lost beside documents",
        "L64",
        "    if causal:\n        seen",
        "    if causal and documents is None:\n        seen",
    ),
    _plain(
        "window lost beside causal",
        "L64",
        "    if window is not None:\n        before",
        "    if window is not None and not causal:\n        before",
    ),
    _plain(
        "bias lost beside causal",
        "L64",
        "    if bias is not None:\n        scores",
        "    if bias is not None and not causal:\n        scores",
    ),
    _plain(
        "mask lost beside lengths",
        "L64",
        "    if allowed is not None:\n        seen",
        "    if allowed is not None and lengths is None:\n        seen",
    ),
    _plain(
        "scale lost beside causal",
        "L64",
        FACTOR,
        FACTOR.replace("if scale is None", "if scale is None or causal"),
    ),
    _plain(
        "log-sum-exp without the bias",
        "L64",
        LSE,
        LSE.replace("scores.log", "(scores - (0 if bias is None else bias)).log"),
    ),
)

TILES = (
    Fault(
        "sums not rescaled from tile to tile",
        "L61",
        "tiled",
        "mass = mass * kept + new.sum(-1)",
        "mass = mass + new.sum(-1)",
    ),
    Fault(
        "what was gathered not rescaled",
        "L61",
        "tiled",
        "gathered = gathered * kept[..., None] +",
        "gathered = gathered +",
    ),
    Fault(
        "the last, ragged tile left out",
        "L61",
        "tiled",
        "range(0, m, tile)",
        "range(0, m if m <= tile else m // tile * tile, tile)",
    ),
    Fault(
        "mask not read past key 128",
        "L61",
        "tiled",
        "~seen[..., start:end]",
        "~(seen[..., start:end] | (start >= 128))",
    ),
    Fault(
        "tiles overlap by a key",
        "L61",
        "tiled",
        "end = min(start + tile, m)",
        "end = min(start + tile + 1, m)",
    ),
    Fault(
        "a query past 128 reads another's scores",
        "L61",
        "tiled",
        "    o = gathered /",
        "    gathered[..., 128:, :] = gathered[..., 128:, :].flip(-2)\n    o = gathered /",
    ),
    Fault(
        "overlap counted twice",
        "L54",
        "in_parts",
        "((0, half), (half, m))",
        "((0, half), (max(half - 1, 0), m))",
    ),
    Fault(
        "parts joined without their weights",
        "L54",
        "in_parts",
        "shares = (logs - most).exp()",
        "shares = ((logs - most) > -inf).to(q.dtype)",
    ),
    Fault(
        "merged parts lose the gradient of their weights",
        "L53",
        "in_parts",
        "shares = (logs - most).exp()",
        "shares = (logs - most).detach().exp()",
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
        "heads turned round before W_O",
        "L06",
        "module",
        "self.w_o(self.join(o))",
        "self.w_o(self.join(o.flip(1)))",
    ),
    Fault(
        "keys from the values' matrix",
        "L06",
        "module",
        "self.split(self.w_k(source))",
        "self.split(self.w_v(source))",
    ),
    Fault(
        "a matrix that is never used",
        "L50",
        "module",
        "self.split(self.w_k(source))",
        "self.split(self.w_v(source))",
    ),
    Fault("padding not handed on", "L31", "module", "lengths=lengths, documents", "documents"),
    Fault("documents not handed on", "L47", "module", ", documents=documents)", ")"),
    Fault("mask not handed on", "L34", "module", "allowed=allowed, causal", "causal"),
    Fault(
        "dropout active in evaluation",
        "L56",
        "module with dropout",
        "self.dropout, self.training",
        "self.dropout, True",
    ),
    Fault(
        "the batch normalised together",
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
        "cache keeps the newest keys alone",
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
        "positions turn the queries alone",
        "L23",
        "rotary module",
        "q, k = rotate(q, start), rotate(k, start)",
        "q, k = rotate(q, start), k",
    ),
)

MODELS = (
    Fault(
        "the future seen in the second layer",
        "L29",
        "decoder",
        "range(layers))",
        "range(layers))\n        self.blocks[-1].attention.past = False",
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
        "causal=self.past",
        "causal=self.past and cache is None",
    ),
    Fault(
        "padding hidden in the first layer alone",
        "L31",
        "encoder",
        "x = block(x, lengths=lengths,",
        "x = block(x, lengths=lengths if i == 0 else None,",
    ),
    Fault(
        "the mean over all positions, padding too",
        "L31",
        "encoder",
        "self.head(self.norm(x))",
        "self.head(self.norm(x + x.mean(1, keepdim=True)))",
    ),
    Fault(
        "one row's padding for all",
        "L31",
        "encoder",
        "x = block(x, lengths=lengths,",
        "x = block(x, lengths=None if lengths is None else lengths.max().expand_as(lengths),",
    ),
    Fault(
        "positions that never learn",
        "L50",
        "encoder",
        "self.places(torch.arange(start, start + ids.shape[1]))",
        "self.places(torch.arange(start, start + ids.shape[1])).detach()",
    ),
    Fault("documents not handed on to the blocks", "L47", "decoder", "documents=documents, cache", "cache"),
)

FAULTS = (*WEIGHTS, *MASKS, *PADDING, *GRADIENTS, *SHAPES, *BIASES, *TOGETHER, *TILES, *MODULES, *MODELS)
