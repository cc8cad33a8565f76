""" "regard" as an attention implementation of transformers: what the registry calls for every layer."""

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...engine.attention import attention
from ...engine.backends import named
from ...engine.explain import explain as explain_call
from ...errors import BackendError, SpecError
from ..patterned import by_head
from ..use import hugging_face_parts
from .arriving import (
    UserPattern,
    at_stored_positions,
    fit_keys,
    fitting,
    fitting_bias,
    mask_and_bias,
    only_selected,
    refuse_unknown,
    sees_all,
)
from .lazy_mask import Mask
from .masks import EVERYTHING
from .problems import Problem, allowed, problems_of, together
from .registration import NAME

TABLE_PAIRS = 1 << 20  # from here on, padding and documents run without a table on the CPU
ROWS_OF_SCORES = 1 << 24  # scores of a dense computation held at a time


class Request(NamedTuple):
    """The arguments of one attention layer: softmax over the keys that the mask and the user's pattern allow."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    user: UserPattern = None
    bias: Tensor | None = None
    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None  # one logit per query head, which is in each row's sum and has no value
    need_weights: bool = False


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    """softmax over what the mask allows, and over the user's pattern for this layer; (b, n, h, d_v) and the weights.

    given: scaling, is_causal, softcap, s_aux, position_bias, sliding_window, cache and what else a family passes on.
    The weights are None unless `output_attentions` is requested: they are n × m.
    """
    refuse_unknown(module, given)
    cache = given.pop("cache", None)
    if cache is not None and hasattr(cache, "update") and not hasattr(cache, "layers"):  # continuous batching
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=given
        )
    held = getattr(key, "regard_held", None)
    query, key, value = fitting(module, query, key, value)
    user = user_pattern(module)
    mask, bias = mask_and_bias(module, query, key, attention_mask, given)
    if mask.m != key.shape[2] and held is None:
        mask = fit_keys(module, mask, key)
    if held is not None and sees_all(mask, held, user):
        note = "all keys that a bounded cache holds for this pattern"
        mask, user = Mask(EVERYTHING.pattern, mask.at, mask.batch, 1, key.shape[2], note=note), None
    elif held is not None or mask.held is not None:
        if held is not None and held.order is not None:
            order = held.order.to(key.device)
            key, value = key.index_select(2, order), value.index_select(2, order)
        mask = at_stored_positions(module, mask, held, user)
    if given.get("indices") is not None:
        mask = only_selected(mask, given["indices"], query.device)
    position_bias = given.get("position_bias")
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    request = Request(
        query, key, value, mask, user, None if bias is None else fitting_bias(bias, query, key),
        given.get("scaling"), dropout, given.get("softcap"), given.get("s_aux"), bool(given.get("output_attentions")),
    )  # fmt: skip
    o, weights = _per_head(request) if isinstance(user, tuple) else _run(request)
    if (record := getattr(_active, "records", None)) is not None:
        record.append(_record(module, request))
    return o.transpose(1, 2).contiguous(), weights


def _run(r: Request) -> tuple[Tensor, Tensor | None]:
    assert not isinstance(r.user, tuple)
    if r.need_weights:
        return dense_attention(r)
    problems = problems_of(r.mask, r.user, r.q.device)
    parts = [_solve(p, r) for p in problems]
    for place in range(len(parts) - 1, 0, -1):  # queries after the end of a row follow those before it
        if problems[place - 1].last is not None:
            parts[place - 1 : place + 1] = [torch.cat(parts[place - 1 : place + 1], 2)]
    problems = [p for place, p in enumerate(problems) if not place or problems[place - 1].last is None]
    if len(parts) == 1 and problems[0].rows is None:
        return parts[0], None
    order = [row for p in problems for row in p.rows or []]
    back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=r.q.device)
    return torch.cat(parts).index_select(0, back), None


def _solve(p: Problem, r: Request) -> Tensor:
    q, k, v, bias = _part(p, r)
    if k.shape[2] == 0 or q.shape[2] == 0:
        o = q.new_zeros(*q.shape[:3], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    else:
        o = _attention(p, q, k, v, {**_options(p, r, q, bias), "dropout_p": r.dropout})
    return nn.functional.pad(o, (0, 0, p.first, 0)) if p.first and not p.follows else o


def _part(p: Problem, r: Request) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The batch rows, queries and keys of a problem."""
    q, k, v, bias = r.q, r.k, r.v, r.bias
    if p.rows is not None:
        rows = torch.tensor(p.rows, device=q.device)
        q, k, v = q.index_select(0, rows), k.index_select(0, rows), v.index_select(0, rows)
        bias = bias if bias is None or bias.shape[0] == 1 else bias.index_select(0, rows)
    if p.first or p.last is not None:
        q = q[:, :, p.first : p.last]
        bias = bias if bias is None or bias.shape[2] == 1 else bias[:, :, p.first : p.last]
    if p.index is not None:
        k, v = k.index_select(2, p.index), v.index_select(2, p.index)
        bias = bias if bias is None or bias.shape[3] == 1 else bias.index_select(3, p.index)
    if p.keys is not None:
        start, stop = p.keys
        k, v = k[:, :, start:stop], v[:, :, start:stop]
        bias = bias if bias is None or bias.shape[3] == 1 else bias[..., start:stop]
    return q, k, v, bias


def _options(p: Problem, r: Request, q: Tensor, bias: Tensor | None) -> dict[str, Any]:
    sinks = None if r.sinks is None else r.sinks.reshape(-1).to(q.dtype)
    return {
        "at": p.at,
        "lengths": p.lengths,
        "bias": bias,
        "scale": r.scale,
        "softcap": r.softcap,
        "sink_logits": sinks,
    }


def _attention(p: Problem, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
    if named() == "auto" and p.by_tiles and q.is_cpu and q.shape[2] * k.shape[2] >= TABLE_PAIRS:
        try:
            return attention(q, k, v, p.pattern, backend="tiles", **given)  # type: ignore[return-value]
        except BackendError:  # dropout, a bias that needs a gradient, …: whatever "auto" chooses
            pass
    return attention(q, k, v, p.pattern, **given)  # type: ignore[return-value]


def user_pattern(module: nn.Module) -> UserPattern:
    """The pattern that `rg.use` declared for this layer: set on the module, or saved in the model's configuration."""
    given = module.__dict__.get("regard_pattern", ...)
    if given is not ...:
        return given
    saved = getattr(getattr(module, "config", None), "regard_patterns", None)
    if not saved:
        return None
    from .patterns import saved_pattern  # which needs what is above

    found = saved_pattern(module, saved)
    module.__dict__["regard_pattern"] = found
    return found


def _per_head(r: Request) -> tuple[Tensor, Tensor | None]:
    """One pattern per query head: heads with equal patterns and their key heads run together."""
    assert isinstance(r.user, tuple)

    def run(pattern, q, k, v, heads, place=0):
        bias = r.bias if r.bias is None or r.bias.shape[1] == 1 else r.bias[:, heads]
        sinks = None if r.sinks is None else r.sinks.reshape(-1)[heads]
        part = r._replace(q=q, k=k, v=v, user=pattern, bias=bias, sinks=sinks, need_weights=place == 1)
        return _run(part)[place]

    o = by_head(r.user, r.q, r.k, r.v, run)
    return o, by_head(r.user, r.q, r.k, r.v, partial(run, place=1)) if r.need_weights else None


def dense_attention(r: Request) -> tuple[Tensor, Tensor | None]:
    """The formula with its scores as tensors, some query rows at a time: for weights as output."""
    assert not isinstance(r.user, tuple)
    q, group, table = r.q, r.q.shape[1] // r.k.shape[1], allowed(r.mask, r.user, r.q.device)
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (r.k, r.v))
    scale = q.shape[-1] ** -0.5 if r.scale is None else r.scale
    rows = max(1, ROWS_OF_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    outs, weights = [], []
    for start in range(0, q.shape[2], rows):
        part = slice(start, start + rows)
        scores = (q[:, :, part] @ k.transpose(-1, -2)) * scale
        if r.softcap is not None:
            scores = torch.tanh(scores / r.softcap) * r.softcap
        if r.bias is not None:
            scores = scores + (r.bias if r.bias.shape[2] == 1 else r.bias[:, :, part])
        seen = table if table.shape[2] == 1 else table[:, :, part]
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        scores = scores.masked_fill(~seen, -torch.inf)
        if r.sinks is not None:
            sink = r.sinks.reshape(1, -1, 1, 1).to(scores.dtype).expand(*scores.shape[:3], 1)
            w = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            w = scores.softmax(-1)
        w = torch.where(seen, w, 0.0).to(q.dtype)
        outs.append(nn.functional.dropout(w, r.dropout) @ v)
        weights.append(w)
    return torch.cat(outs, 2), torch.cat(weights, 2) if r.need_weights else None


# What ran, and why

_active = threading.local()


@dataclass(frozen=True)
class LayerCall:
    """One attention call of a model: which layer, what it may attend to, and how it was computed."""

    layer: str
    pattern: str
    queries: int
    keys: int
    how: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.pattern}, {self.queries:,} queries, {self.keys:,} keys: {self.how}"


def _record(module: nn.Module, r: Request) -> LayerCall:
    users = r.user if isinstance(r.user, tuple) else (r.user,)
    label = " / ".join(dict.fromkeys(repr(together(r.mask.pattern, u)) for u in users))
    if r.mask.dense is not None:
        label = " / ".join(dict.fromkeys("table" if u is None else f"table & {u!r}" for u in users))
    if r.need_weights:
        how = "dense formula, because of output_attentions"
    else:
        p = problems_of(r.mask, users[0], r.q.device)[0]
        q, k, v, bias = _part(p, r)
        found = explain_call(q, k, v, p.pattern, **_options(p, r, q, bias))
        lines = [line.strip() for line in str(found).splitlines()]
        how = next((line for line in lines if line.startswith("backend")), lines[-1])
        how = how.removeprefix("backend").strip()
    notes = [how, *([r.mask.note] if r.mask.note else [])]
    name = getattr(module, "regard_name", None) or type(module).__name__
    index = getattr(module, "layer_idx", None)
    name = name if index is None else f"{name} {index}"
    return LayerCall(name, label, r.q.shape[2], r.k.shape[2], "; ".join(notes))


def explain(model: nn.Module, *args: Any, **inputs: Any) -> list[LayerCall]:
    """Run the model once and return one entry per attention call: its pattern, its backend and why."""
    if not any(m.config._attn_implementation == NAME for m in hugging_face_parts(model).values()):
        raise SpecError(
            'the model does not use "regard"; call rg.use(model) or set_attn_implementation("regard") first'
        )
    names = {id(m): name for name, m in model.named_modules()}
    for m in model.modules():
        if "regard_name" not in m.__dict__ and hasattr(m, "layer_idx"):
            m.__dict__["regard_name"] = names[id(m)]
    _active.records = []
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # a compiled graph records nothing
            model(*args, **inputs)
        return _active.records
    finally:
        _active.records = None
