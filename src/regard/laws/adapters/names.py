"""Parameter names by which libraries call the options of attention, and what docstrings say about masks and axes."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

# option → common parameter names.
NAMES = {
    "mask": ("allowed", "attn_mask", "attention_mask", "mask", "pattern", "keep", "visible"),
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "softcap": ("softcap", "soft_cap", "logits_soft_cap", "attn_logit_softcapping"),
    "sink logits": ("sink_logits", "s_aux", "learnable_sink"),
    "bias": ("bias", "attn_bias", "score_bias", "position_bias"),
    "lengths": (
        *("lengths", "key_lengths", "kv_lengths", "seqlens", "seq_lens", "seqlens_k", "cache_seqlens"),
        *("kv_lens", "lens", "valid_lens", "valid_len", "seq_lengths", "k_lengths", "kv_len", "context_lens"),
    ),
    "documents": ("documents", "document_ids", "doc_ids", "segment_ids", "segments", "seq_ids"),
    "window": ("window", "window_size", "sliding_window"),
    "lse": ("return_lse", "lse"),
    "weights": ("return_weights", "weights", "need_weights", "return_attn"),
    "dropout": ("dropout_p", "dropout", "p_dropout"),
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

# A mask parameter of this name says which polarity it has; of any other it is what scaled_dot_product_attention has.
KEEPS = ("allowed", "attention_mask", "keep", "visible", "mask", "pattern", "attn_mask")
HIDES = (*PADDING, "masked", "blocked", "hide", "hidden")

_TRUE = r"(?:true|1s?|ones|non-?zero|set)\b[^.;,\n]{0,45}?"
_KEEPING = "attend|allow|keep|kept|valid|visible|real|token|takes? part|participat|include"
_HIDING = "mask|pad|ignor|block|forbid|hidden|hide|exclud|not allowed|not attend|n't attend|drop|skip|future"
_SAYS_KEEP = re.compile(_TRUE + rf"(?<!not )(?<!n't )\b({_KEEPING})", re.I)
_SAYS_HIDE = re.compile(_TRUE + rf"({_HIDING})", re.I)


def parameters_of(call: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """By name, without *args and **kwargs; None if there is no signature (a builtin)."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return None
    return {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def recognized(parameters: Mapping[str, Any]) -> dict[str, str]:
    """option → the name of its parameter."""
    found = {}
    for option, names in NAMES.items():
        name = next((n for n in names if n in parameters), None)
        if name is not None and (option != "dropout" or _is_number(parameters[name].default)):
            found[option] = name
    return found


def _is_number(default: Any) -> bool:
    return isinstance(default, int | float) and not isinstance(default, bool)


def text_of(thing: Any) -> str:
    """The docstring and the comments of a function or class: what its author says about it."""
    owner = type(thing) if isinstance(thing, nn.Module) else thing
    calls = [owner, getattr(owner, "forward", None)] if isinstance(owner, type) else [owner]
    words = []
    for call in calls:
        words.append(inspect.getdoc(call) or "" if not isinstance(call, type) or call.__doc__ else "")
        try:
            source = inspect.getsource(call) if call is not None else ""
        except (OSError, TypeError):
            source = ""
        words += re.findall(r"#\s*(.*)", source)
    return "\n".join(words)


def polarity(name: str, text: str, default: str = "keep") -> str:
    """What True means in a mask: "keep" or "hide", from the text about it, then from its name."""
    mentions = re.compile(rf"\b{re.escape(name)}\b|mask|pad")
    about = [line for line in re.split(r"\n|(?<=[.;])\s", text) if mentions.search(line)]
    for line in about:
        keeps, hides = _SAYS_KEEP.search(line), _SAYS_HIDE.search(line)
        if hides and (not keeps or hides.start() < keeps.start()):
            return "hide"
        if keeps:
            return "keep"
    return "hide" if name in HIDES else default


def size_of(module: nn.Module, names: tuple[str, ...], kind: type = int) -> Any:
    """The first attribute of the module, or of its configuration, that has one of these names."""
    owners = [module, *(getattr(module, n) for n in ("config", "cfg", "args") if hasattr(module, n))]
    values = (getattr(owner, name, None) for owner in owners for name in names)
    right = (v for v in values if isinstance(v, kind) and (kind is bool or not isinstance(v, bool)))
    return next(right, None)
