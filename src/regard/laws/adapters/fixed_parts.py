"""What a function does in every call: a causal mask, a window, positions; from its name, docstring and by probing."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ...position import rotate
from ..call_times import CallTimes
from . import layouts
from .function_reader import FunctionReader, effect_of

WINDOW_SECONDS = 2.0  # processor time for the calls that look for a fixed window
WITH_ITSELF = (  # words for a window that counts the query's own key
    r"itself and the `?w\w*`?\s*[-−]\s*1 (keys|positions|tokens)? ?before"
    r"|last `?w\w*`? (keys|positions|tokens)[^.;]{0,20}(up to|including|with) (and including )?itself"
    r"|(last `?w\w*`?|causal[^.;]{0,40}window of (\d+|`?w\w*`?)) (keys|positions|tokens),? "
    r"(itself included|including itself)"
    r"|number of (keys|positions|tokens)[^.;]{0,30}(itself|\bown)( (key|position|token|one))? (is )?included"
    r"|number of (keys|positions|tokens)[^.;]{0,30}(including|with|counting) (itself|the query|its own|the current)"
)


def read_window(reader: FunctionReader, text: str) -> None:
    """Whether a window is a pair or a number of keys, and which keys a number includes."""
    if "window" not in reader.names:
        return
    i, j = torch.arange(9)[:, None], torch.arange(9)
    forms = {
        "(before, after)": ((3, 1), (i - j <= 3) & (j - i <= 1)),
        "w keys with itself, causal": ((2, 0), (i - j <= 2) & (j <= i)),
        "w keys before, causal": ((3, 0), (i - j <= 3) & (j <= i)),
        "w keys each side": ((3, 3), (i - j).abs() <= 3),
        "w - 1 keys each side": ((2, 2), (i - j).abs() <= 2),
    }
    stated = stated_window(text)
    ran = None
    for form, (value, table) in forms.items():
        reader.window = form
        causal = {"causal": True} if form.endswith("causal") and "causal" in reader.names else {}
        try:
            effect = effect_of(reader, {"window": value, **causal}, 9)
        except Exception:
            continue
        if stated is not None and form != "(before, after)" and form != stated:
            continue
        ran = ran or form
        if bool((effect == table).all()):
            break
    else:
        reader.window = stated or ran or "(before, after)"
    if reader.window != "(before, after)":
        reader.notes.append(f"{reader.names['window']}: {reader.window}")


def stated_window(text: str) -> str | None:
    """The inequality that a docstring states for a window given as a number."""
    if re.search(r"\b[ip]\s*[-−]\s*w\w*\s*\+\s*1\b", text) or re.search(WITH_ITSELF, text, re.I):
        return "w keys with itself, causal"
    if re.search(r"\b[ip]\s*[-−]\s*w\w*\s*(\.\.|…|to)\s*[ip]\b", text):
        return "w keys before, causal"
    found = re.search(r"(\|?)i\s*[-−]\s*j\1?\s*(<=|<|≤)\s*w", text)
    if found is None:
        return None
    both = bool(found.group(1))
    if found.group(2) == "<":
        return "w - 1 keys each side" if both else "w keys with itself, causal"
    return "w keys each side" if both else "w keys before, causal"


def is_stated_causal(name: str, text: str) -> bool:
    """Whether the name or docstring of a function says that it is always causal."""
    words = f"{name}\n{text}".lower()
    return bool(re.search(r"causal|autoregressive|decoder self", words)) and not re.search(
        r"(not|non|no|without|never)[- ]?(causal|autoregressive)|causal\s*(=|if|when)|bidirectional", words
    )


def probed_alignment(reader: FunctionReader) -> str:
    """How the causal mask is aligned with 3 queries and 5 keys; top-left if that cannot be determined."""
    g = torch.Generator().manual_seed(2)
    rows = 1 if reader.layout in layouts.LOOPED else 2
    q, k = torch.randn(rows, rows, 3, 6, generator=g), torch.randn(rows, rows, 5, 6, generator=g)
    v = torch.eye(5, 6).expand_as(k).contiguous()
    try:
        with torch.no_grad():
            out = reader.call(q, k, v)
    except Exception:  # foreign code; it may take n = m only
        return "top-left"
    o = out[0] if isinstance(out, tuple) else out
    i, j = torch.arange(3)[:, None], torch.arange(5)
    last = o.shape == q.shape and torch.equal((o[0, 0, :, :5].abs() > 1e-7), j <= i + 2)
    return "bottom-right" if last else "top-left"


def read_positions(reader: FunctionReader, name: str, text: str) -> str:
    """Positions that a name or docstring states: "alibi", "rotary halves", "rotary interleaved" or ""."""
    words = f"{name}\n{text}".lower()
    if re.search(r"alibi", words):
        reader.notes.append("ALiBi in every call, according to its name or docstring")
        return "alibi"
    if not re.search(r"rotary|\brope\b|(?<![a-z])rope_", words):
        return ""
    pairs = re.search(r"2i\s*,\s*2i\s*\+\s*1|interleav|neighbou?ring|adjacent|even and odd", words)
    halves = re.search(r"i\s*\+\s*d\s*/\s*2|rotate_half|halves|half-split|\[.*:.*//\s*2", words)
    pairing = "interleaved" if pairs and not halves else "halves"
    if not pairs and not halves:
        pairing = _probed_pairing(reader)
    columns = "in two halves" if pairing == "halves" else "interleaved"
    reader.notes.append(
        f"rotary positions in every call, according to its name or docstring; columns paired {columns}"
    )
    return f"rotary {pairing}"


def _probed_pairing(reader: FunctionReader) -> str:
    """The pairing of columns under which a call with rotated q and k is correct; "halves" if neither is."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4, 5, 8, generator=g) for _ in range(3))
    try:
        with torch.no_grad():
            out = reader.call(q, k, v)
    except Exception:  # foreign code; the laws report what raises
        return "halves"
    o = out[0] if isinstance(out, tuple) else out
    for pairing in ("halves", "interleaved"):
        a, b = (rotate(x, torch.arange(5), pairing=pairing) for x in (q, k))
        for causal in (True, False):
            want = F.scaled_dot_product_attention(a, b, v, is_causal=causal)
            if o.shape == want.shape and torch.allclose(o, want, atol=1e-4):
                return pairing
    return "halves"


def sizes_of(reader: FunctionReader, positions: str) -> dict[str, tuple[int, ...]]:
    """Sizes that positions restrict: even widths for rotary; for ALiBi numbers of heads whose slopes are standard."""
    if positions == "alibi":
        return {"h": (1, 2, 4, 8)}
    if positions or reader.even:
        widths = (2, 4, 6, 8, 16, 66, 80, 130, 136, 144, 260)
        return {"d_k": widths, "d_v": widths}
    return {}


def find_fixed_window(reader: FunctionReader, name: str, text: str) -> tuple[int, int] | None:
    """(before, after) of a function that is called local and takes no window, from a plain call."""
    words = f"{name}\n{text}\n{_code_names(reader.function)}".lower()
    if "window" in reader.names or not re.search(r"window|local|sliding|banded", words):
        return None
    times = CallTimes(WINDOW_SECONDS)
    # A window that is wider than the call hides no key. Larger calls have one head, because they are slow.
    for n, heads in ((24, None), (64, 1), (300, 1), (1100, 1)):
        i, j = torch.arange(n)[:, None], torch.arange(n)
        if (seconds := times.estimate(n * n)) > times.left:
            reader.notes.append(
                f"no call with {n:,} positions was made to find a fixed window: it would take about {seconds:.0f} s"
            )
            return None
        call = partial(effect_of, reader, {}, n, heads)
        try:
            effect = call() if heads is None else times.run(call, n * n)
        except Exception:  # foreign code; the laws report what raises
            return None
        pairs = effect.flatten(0, -3)
        before, after = (int(((i - j) * side * pairs[0]).max()) for side in (1, -1))
        band = (i - j <= before) & (j - i <= after)
        if not bool((pairs == band).all()):
            return None
        if before < n - 1 and after < n - 1:
            keys = f"i − {before} … i" + (f" + {after}" if after else "")
            reader.notes.append(f"query i attends to the keys {keys} in every call (found by probing)")
            return before, after
    return None


def _code_names(function: Callable[..., Any]) -> str:
    """Names that the code of a function uses, for a lambda that only calls another function."""
    code = getattr(function, "__code__", None)
    return "" if code is None else " ".join((*code.co_names, *code.co_freevars))
