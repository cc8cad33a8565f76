"""Parameter names that libraries use for the options of attention, and what docstrings say about masks and axes."""

import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import nn

# option → common parameter names.
NAMES = {
    "mask": ("allowed", "attn_mask", "attention_mask", "mask", "pattern", "keep", "visible"),
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "softcap": ("softcap", "soft_cap", "logits_soft_cap", "attn_logit_softcapping"),
    "sink logits": ("sink_logits", "s_aux", "learnable_sink", "sinks", "sink", "attention_sinks"),
    "bias": ("bias", "attn_bias", "score_bias", "position_bias"),
    "lengths": (
        *("lengths", "key_lengths", "kv_lengths", "seqlens", "seq_lens", "seqlens_k", "cache_seqlens"),
        *("kv_lens", "lens", "valid_lens", "valid_len", "seq_lengths", "k_lengths", "kv_len", "context_lens"),
    ),
    "documents": ("documents", "document_ids", "doc_ids", "segment_ids", "segments", "seq_ids"),
    "window": ("window", "window_size", "sliding_window"),
    "lse": ("return_lse", "lse"),
    "weights": ("return_weights", "weights", "need_weights", "return_attn"),
    "dropout": ("dropout_p", "dropout", "p_dropout", "p_drop", "dropout_rate", "drop_p", "p"),
}
GROUPED = "enable_gqa"
START = ("start", "offset", "query_offset", "start_pos", "q_start", "q_offset", "past_len", "pos_offset")
HEAD_COUNTS = (
    "heads",
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "h",
    "nheads",
    "head",
    "num_attention_heads",
)
KV_HEAD_COUNTS = ("kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads", "h_kv", "n_kv_head")
PADDING = (
    *("key_padding_mask", "padding_mask", "pad_mask", "src_key_padding_mask", "key_mask", "key_pad_mask"),
    *("is_pad", "pad"),
)
TRAINING = ("training", "is_training", "train")
CONTEXT = (
    "context",
    "memory",
    "encoder_hidden_states",
    "kv",
    "enc",
    "enc_out",
    "encoder_output",
    "source",
    "mem",
    "xa",
    "ctx",
    "cond",
    "encoder_out",
)
CACHES = ("past_key_values", "past_key_value", "past", "cache", "kv_cache", "layer_past", "past_kv")
CONTEXT_PADDING = (
    "memory_key_padding_mask",
    "context_padding_mask",
    "memory_mask",
    "context_mask",
    "src_mask",
)
TOKENS = ("ids", "input_ids", "tokens", "token_ids", "idx")
WIDTHS = ("d_model", "embed_dim", "dim", "hidden_size", "n_embd", "width", "d", "emb", "embedding_dim")
LENGTH_LIMITS = (
    "max_length",
    "max_len",
    "block_size",
    "max_seq_len",
    "n_ctx",
    "context_length",
    "max_seq_length",
)
QUERIES, KEYS, VALUES = (
    ("q", "query", "queries", "xq"),
    ("k", "key", "keys", "xk"),
    ("v", "value", "values", "xv"),
)

# A mask parameter with one of these names is True where a key is hidden; with any other name, as in
# scaled_dot_product_attention, True means that the key may be attended to.
HIDES = (*PADDING, "masked", "blocked", "hide", "hidden")

_TRUE = r"(?:true|1s?|ones|non-?zero|set)\b[^.;,\n]{0,45}?"
_KEEPING = "attend|allow|keep|kept|valid|visible|real|token|takes? part|participat|include"
_HIDING = "mask|pad|ignor|block|forbid|hidden|hide|exclud|not allowed|not attend|n't attend|drop|skip|future"
_SAYS_KEEP = re.compile(_TRUE + rf"(?<!not )(?<!n't )\b({_KEEPING})", re.I)
_SAYS_HIDE = re.compile(_TRUE + rf"({_HIDING})", re.I)


def parameters_of(call: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """The parameters by name, without *args and **kwargs; None if there is no signature (a builtin)."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return None
    return {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def in_usual_order(
    call: Callable[..., Any], parameters: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[str]]:
    """The function with its first three parameters in the order q, k, v, and a note if they were in another order.

    Keras has (query, value, key). The names decide; if they are not known, the order is q, k, v.
    """
    first = [name.lower() for name in list(parameters)[:3]]
    order = [next((i for i, n in enumerate(first) if n in names), -1) for names in (QUERIES, KEYS, VALUES)]
    if sorted(order) != [0, 1, 2] or order == [0, 1, 2]:
        return call, []

    def reordered(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given = dict(zip(order, (q, k, v)))
        return call(*(given[i] for i in range(3)), **options)

    return reordered, [f"its arguments are ({', '.join(list(parameters)[:3])}), according to their names"]


def recognized(parameters: Mapping[str, Any], text: str = "") -> dict[str, str]:
    """option → the name of its parameter. text: what the function says about itself."""
    found = {}
    for option, names in NAMES.items():
        name = next((n for n in names if n in parameters), None)
        if name is None or (option == "dropout" and not _is_number(parameters[name].default)):
            continue
        # A sink may also be a number of keys that every query attends to.
        logits = re.search(r"\blogit|\bone more score", text) or "Tensor" in str(parameters[name].annotation)
        counted = _is_number(parameters[name].default) or not logits
        if option == "sink logits" and name in names[3:] and counted:
            continue
        found[option] = name
    return found


def _is_number(default: Any) -> bool:
    return isinstance(default, int | float) and not isinstance(default, bool)


def text_of(thing: Any) -> str:
    """The docstring and the comments of a function or class."""
    owner = type(thing) if isinstance(thing, nn.Module) else thing
    calls = [owner, getattr(owner, "forward", None)] if isinstance(owner, type) else [owner]
    words = []
    for call in calls:
        text = inspect.getdoc(call) or "" if not isinstance(call, type) or call.__doc__ else ""
        words.append("" if text == inspect.getdoc(nn.Module.forward) else text)  # PyTorch's, inherited
        try:
            source = inspect.getsource(call) if call is not None else ""
        except (OSError, TypeError):
            source = ""
        words += re.findall(r"#\s*(.*)", source)
    return "\n".join(words)


MIXERS = (  # words for what mixes positions, and is no attention
    r"mamba|\bssm|\bs[46]\b|state.space|recurren|conv(?!e)|rwkv|retention|hyena|delta.?net|\bscan\b|linear attention"
)


def mixes_otherwise(module: nn.Module) -> bool:
    """Whether a recurrence or a convolution over positions is a part of a module, so that order matters in it."""
    if any(isinstance(m, nn.RNNBase) for m in module.modules()):
        return True
    if any(isinstance(m, nn.Conv1d) and m.kernel_size != (1,) for m in module.modules()):
        return True
    own = (m for m in module.modules() if not type(m).__module__.startswith("torch."))
    return any(re.search(MIXERS, f"{type(m).__name__}\n{text_of(m)}", re.I) for m in own)


def windowed_by_default(parameter: inspect.Parameter) -> bool:
    """Whether a window is required or has a default that hides keys, not None or −1: then every call has one."""
    default = parameter.default
    sides = default if isinstance(default, tuple) else (default,)
    return default is parameter.empty or all(_is_number(side) and side > 0 for side in sides)


def source_of(module: nn.Module) -> str:
    """The code of a module's class and of the classes that it inherits from, without those of PyTorch."""
    own = itertools.takewhile(lambda c: c is not nn.Module, type(module).__mro__)
    sources = []
    for each in own:
        with suppress(OSError, TypeError):  # defined in an interactive session, or a builtin
            sources.append(inspect.getsource(each))
    return "\n".join(sources)


def polarity(name: str, text: str, default: str = "keep") -> str:
    """What True means in a mask: "keep" or "hide", from the text about it, then from its name."""
    lines = re.split(r"\n|(?<=[.;])\s", text)
    named = [line for line in lines if re.search(rf"\b{re.escape(name)}\b", line)]
    # "the mask" may mean this one, unless the line names another parameter
    others = re.compile(r"\b\w*(?:mask|pad)\w*_\w+|\w+_\w*(?:mask|pad)\w*")
    general = [line for line in lines if re.search("mask|pad", line) and not others.search(line)]
    for line in (*named, *general):
        keeps, hides = _SAYS_KEEP.search(line), _SAYS_HIDE.search(line)
        if hides and (not keeps or hides.start() < keeps.start()):
            return "hide"
        if keeps:
            return "keep"
    return "hide" if name in HIDES else default


def says_square(text: str) -> bool:
    """Whether a docstring says that there are as many keys as queries."""
    return bool(re.search(r"\bn\s*={1,2}\s*m\b|\bsame number of (keys|queries)|\bself-attention only", text))


def says_zeros_for_empty_rows(text: str) -> bool:
    """Whether a docstring promises zeros for a query that has no allowed key."""
    none = r"no (open|allowed|visible|valid|unmasked) keys?|fully masked (row|quer)|empty rows?"
    return bool(re.search(rf"({none})[^.;\n]{{0,40}}(zero|0)", text, re.I))


PROMISES = {  # claim → words of a docstring that state it
    "float64": r"float64 (is )?(kept|preserved)|keeps float64|in float64",
    "float32 sums": r"accumulat\w*( \w+){0,3} in (float32|fp32)|(float32|fp32) (accumulat|sums)",
    "float16 range": r"float16[^.;\n]{0,30}without overflow|float16[^.;\n]{0,30}(no|not) overflow",
}


def promised(text: str) -> set[str]:
    """Claims that a docstring states."""
    found = {claim for claim, words in PROMISES.items() if re.search(words, text, re.I)}
    return found | ({"empty rows"} if says_zeros_for_empty_rows(text) else set())


def stated_mask(name: str, text: str) -> str:
    """What a docstring says about a mask parameter, each time up to the end of the sentence; "" if nothing."""
    return "\n".join(re.findall(rf"\b{re.escape(name)}\b(?!\s*=)[^.;\n]*", text))


def says_added(name: str, text: str) -> bool:
    """Whether a docstring says that a float mask is added to the scores: then it may have any finite values."""
    return bool(re.search(r"\badded\b", stated_mask(name, text)))


def says_integers(name: str, text: str) -> bool:
    """Whether a docstring says that a mask may have integers 0 and 1."""
    numbers = r"\b0 ?(/|and|or) ?1\b|\b1 ?(/|and|or) ?0\b|\b1s?\b ?(=|means?|marks?|for|where)(?!\w)"
    types = r"\bint(eger)?s?\b|\blong\b"
    stated = re.sub(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", "", stated_mask(name, text))  # without shapes
    return bool(re.search(f"{numbers}|{types}", stated, re.I))


def says_sequence_first(text: str) -> bool:
    """Whether a docstring says that the axes are (n, b, d)."""
    length, batch = r"(n|l|t|s|seq|seq_len|seqlen|length|time)", r"(b|bs|bsz|batch|batch_size)"
    return bool(re.search(rf"sequence[- ]first|time[- ]first|\(\s*{length}\s*,\s*{batch}\s*,", text, re.I))


def says_no_gradient(text: str) -> bool:
    return bool(
        re.search(r"inference[- ]only|no gradients?\b|not differentiable|forward[- ]only", text, re.I)
    )


def stated_alignment(text: str) -> str | None:
    """The alignment that a docstring states for the causal mask if there are more keys than queries."""
    last = r"\bm\s*[-−]\s*n\b|last n positions|(bottom|lower)[- ]right|aligned (at|to|with) the (end|last)|last key\b"
    first = r"top[- ]left|upper[- ]left|aligned (at|to|with) the (start|first|beginning)"
    if re.search(first, text, re.I):
        return "top-left"
    return "bottom-right" if re.search(last, text, re.I) else None


def size_of(module: nn.Module, names: tuple[str, ...], kind: type = int) -> Any:
    """The first attribute of the module, or of its configuration, that has one of these names."""
    owners = [module, *(getattr(module, n) for n in ("config", "cfg", "args") if hasattr(module, n))]
    values = (getattr(owner, name, None) for owner in owners for name in names)
    right = (v for v in values if isinstance(v, kind) and (kind is bool or not isinstance(v, bool)))
    return next(right, None)
