"""regard's own: the door `rg.attention`, and whatever a spec builds."""

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ... import pattern as patterns
from ... import spec
from ...engine import attention as engine
from ...errors import SpecError
from ...nn.attention import MultiHeadAttention
from ...nn.block import Block
from ...nn.cache import KeyValues
from ...nn.feed_forward import FeedForward
from ...nn.stack import EncoderDecoder, Stack, Vision
from ...pattern import Both, Pattern, causal, full, window
from ...position import learned
from ..target import Function, Model, Projections
from .seeded import seeded
from .small_specs import small

IMPORTS = "import regard as rg\nfrom regard.laws import adapters"
PROMISES = {
    *{"float64", "float32", "float16", "bfloat16", "grad", "double backward", "deterministic", "grouped"},
    *{"n≠m", "d_v≠d_k", "mask and causal", "empty rows", "nan under lengths"},
}


def regard_function(backend: str = "auto") -> Function:
    """rg.attention, by its own choice of way or by the one named. It promises all but NaN under a mask."""

    def call(q, k, v, *, lse=False, weights=False, dropout_p=0.0, **asked) -> Any:
        n, m = q.shape[-2], k.shape[-2]
        given = {"bias": asked.pop("bias", None), "scale": asked.pop("scale", None)}
        given |= {"lengths": asked.pop("lengths", None), "pattern": _pattern(n, m, **asked)}
        if isinstance(given["pattern"], Pattern) and n > m:
            given["at"] = m - n  # the alignment, said; without it more queries than keys are refused
        if weights:
            o = engine.attention(q, k, v, **given, backend=backend)
            return o, engine.weights(q, k, **given)
        return engine.attention(q, k, v, **given, dropout_p=dropout_p, return_lse=lse, backend=backend)

    options = {
        "mask",
        "causal",
        "scale",
        "bias",
        "lengths",
        "documents",
        "window",
        "lse",
        "weights",
        "dropout",
    }
    named = "" if backend == "auto" else f"backend={backend!r}"
    return Function(
        "regard.attention" + (f" ({named})" if named else ""),
        call,
        claims=options | PROMISES,
        alignment="bottom-right",
        source=f"adapters.regard_function({named})",
        imports=IMPORTS,
    )


def _pattern(
    n: int,
    m: int,
    allowed: Bool[Tensor, "..."] | None = None,
    causal: bool = False,
    documents: Int[Tensor, "b n"] | None = None,
    window: tuple[int, int] | None = None,
) -> Pattern | Tensor | None:
    """What was asked for as one pattern; as a table where a table is part of it."""
    parts: list[Pattern] = [patterns.causal()] if causal else []
    parts += [patterns.window(*window)] if window is not None else []
    parts += [patterns.documents(documents)] if documents is not None else []
    whole = None
    for part in parts:
        whole = part if whole is None else whole & part
    if allowed is None or whole is None:
        return whole if allowed is None else allowed
    return allowed & whole.allowed(n, m, at=m - n, device=allowed.device)


def regard_model(thing: spec.Spec | nn.Module) -> Model:
    """The module of a spec, small, with fresh weights and without dropout; or a module that was built from one."""
    if isinstance(thing, spec.Spec):
        source = f"adapters.regard_model(rg.from_json({thing.json()!r}))"
        declared, note = small(thing)
        model = _adapted(seeded(declared.build), source)
        return replace(model, name=model.name + note)
    return _adapted(thing, None)


def _adapted(thing: nn.Module, source: str | None) -> Model:
    match thing:
        case MultiHeadAttention():
            return _attention(thing, source)
        case Block():
            return _block(thing, source)
        case Stack():
            return _stack(thing, source)
        case EncoderDecoder():
            return _encoder_decoder(thing, source)
        case Vision():
            return _vision(thing, source)
    raise SpecError(f"{type(thing).__name__} holds no attention of regard that the laws could speak of")


def _attention(module: MultiHeadAttention, source: str | None) -> Model:
    declared, size = module.spec, module.spec.sizes
    able = {"mask", "lengths", "documents", "weights", "nan under lengths", "empty rows", "deterministic"}
    if isinstance(declared.pattern, full):
        able |= {"causal", "mask and causal"}
    if declared.position is None and isinstance(declared.pattern, full):
        able |= {"context", "context lengths"}
    plain = declared.score == "dot" and declared.position is None and declared.factor is None
    plain = plain and declared.output and isinstance(declared.pattern, full)
    return Model(
        f"regard.{declared!r}",
        module,
        _call_attention,
        of="attention",
        d_model=size.d_model,
        d_context=size.d_context,
        heads=size.heads,
        layers=1,
        projections=_projections if plain else None,
        start=lambda module, b, context=None: KeyValues(),
        step=_next,
        **_words(declared, able),
        source=source,
        imports=IMPORTS,
    )


def _call_attention(
    module: nn.Module,
    x: Float[Tensor, "b n d"],
    context: Float[Tensor, "b m e"] | None = None,
    *,
    lengths: Int[Tensor, " b"] | None = None,
    context_lengths: Int[Tensor, " b"] | None = None,
    weights: bool = False,
    **asked: Any,
) -> Any:
    n, m = x.shape[1], (x if context is None else context).shape[1]
    return module(
        x,
        context,
        lengths=lengths if context is None else context_lengths,
        pattern=_asked_pattern(n, m, **asked),
        return_weights=weights,
    )


def _asked_pattern(n: int, m: int, *, allowed: Bool[Tensor, "..."] | None = None, **asked: Any) -> Any:
    """A table of a model is (b, n, m); the heads see it alike."""
    if allowed is not None and allowed.dim() == 3:
        allowed = rearrange(allowed, "b n m -> b 1 n m")
    return _pattern(n, m, allowed=allowed, **asked)


def _next(module: nn.Module, x: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        return module(x, cache=cache)


def _projections(module: nn.Module) -> Projections:
    """Views, head by head."""
    assert isinstance(module, MultiHeadAttention)
    size, out = module.spec.sizes, module.w_o
    linears, counts = (module.w_q, module.w_k, module.w_v), (size.heads, size.kv_heads, size.kv_heads)
    assert isinstance(out, nn.Linear)
    w_q, w_k, w_v = (w.weight.view(h, -1, w.in_features).mT for w, h in zip(linears, counts) if w is not None)
    w_o = out.weight.view(out.out_features, size.heads, -1).permute(1, 2, 0)
    views = Projections(w_q, w_k, w_v, w_o, b_o=out.bias)
    if module.spec.biases != "all":
        return views
    b_q, b_k, b_v = (w.bias.view(h, -1) for w, h in zip(linears, counts) if w is not None)
    return views._replace(b_q=b_q, b_k=b_k, b_v=b_v)


def _block(module: Block, source: str | None) -> Model:
    declared = module.spec
    able = {"mask", "lengths", "documents", "nan under lengths", "empty rows", "deterministic"}
    cross = {"context", "context lengths"} if declared.cross is not None else set()
    pre = declared.norm_at == "pre" and declared.residual
    return Model(
        f"regard.Block, {declared.d_model} wide",
        module,
        _call_stack,
        of="decoder" if cross else "encoder",
        d_model=declared.d_model,
        d_context=declared.cross.sizes.d_context if declared.cross else None,
        heads=declared.attention.heads,
        layers=1,
        silence=silence if pre else None,
        **_words(declared.attention, able | cross | ({"pre-norm"} if pre else set()), cache=False),
        source=source,
        imports=IMPORTS,
    )


def _stack(module: Stack, source: str | None) -> Model:
    declared = module.spec
    block = declared.block
    able = {"mask", "lengths", "documents", "nan under lengths", "empty rows", "deterministic"}
    cross = {"context", "context lengths"} if block.cross is not None else set()
    pooled = isinstance(declared.head, spec.ClassifierHead | spec.Pooler)
    pre = block.norm_at == "pre" and block.residual and not declared.has_final_norm and declared.head is None
    pre = pre and declared.embedding is None
    attention = replace(block.attention, position=declared.position or block.attention.position)
    words = _words(attention, able | cross | ({"pre-norm"} if pre else set()), declared.embedding)
    if pooled:
        words["claims"] = (words["claims"] - {"cache"}) | {"pooled"}
        if getattr(declared.head, "pool", "first") == "last":
            words["claims"] -= {"always causal"}
    return Model(
        f"regard.{type(declared).__name__}, {declared.layers} layers {declared.d_model} wide",
        module,
        _call_stack,
        of="decoder" if isinstance(declared, spec.Decoder) else "encoder",
        d_model=declared.d_model,
        vocab=None if declared.embedding is None else declared.embedding.vocab,
        d_context=None if block.cross is None else block.cross.sizes.d_context,
        longest=_longest(declared.embedding),
        layers=declared.layers,
        window=_window(block.attention.pattern),
        heads=block.attention.heads,
        start=lambda module, b, context=None: (module.cache(), context),
        step=_next_of_stack,
        silence=silence if pre else None,
        **words,
        source=source,
        imports=IMPORTS,
    )


def _call_stack(
    module: nn.Module,
    x: Tensor,
    context: Tensor | None = None,
    *,
    lengths: Int[Tensor, " b"] | None = None,
    context_lengths: Int[Tensor, " b"] | None = None,
    **asked: Any,
) -> Tensor:
    pattern = _asked_pattern(x.shape[1], x.shape[1], **asked)
    given = {"lengths": lengths, "pattern": pattern}
    return (
        module(x)
        if context is None and not any(v is not None for v in given.values())
        else module(x, context, context_lengths=context_lengths, **given)
    )


def _next_of_stack(module: nn.Module, x: Tensor, kept: Any, **asked: Any) -> Tensor:
    cache, context = kept
    with torch.no_grad():
        return module(x, context, cache=cache, **asked)


def _encoder_decoder(module: EncoderDecoder, source: str | None) -> Model:
    declared = module.spec
    decoder = declared.decoder
    attention = decoder.block.attention
    attention = replace(attention, position=decoder.position or attention.position)
    able = {"lengths", "context", "context lengths", "nan under lengths", "empty rows", "deterministic"}
    tables = [e for e in (declared.encoder.embedding, decoder.embedding) if e is not None]
    return Model(
        f"regard.EncoderDecoder, {declared.encoder.layers} + {decoder.layers} layers {declared.d_model} wide",
        module,
        _translate,
        of="encoder-decoder",
        d_model=declared.d_model,
        vocab=min(e.vocab for e in tables) if tables else None,
        longest=min(_longest(e) for e in tables) if tables else 64,
        layers=decoder.layers,
        heads=attention.heads,
        start=_begin_translation,
        step=_next_of_translation,
        **_words(attention, able, decoder.embedding),
        source=source,
        imports=IMPORTS,
    )


def _translate(
    module: nn.Module,
    x: Tensor,
    context: Tensor,
    *,
    lengths: Int[Tensor, " b"] | None = None,
    context_lengths: Int[Tensor, " b"] | None = None,
) -> Tensor:
    return module(context, x, source_lengths=context_lengths, target_lengths=lengths)


def _begin_translation(module: nn.Module, b: int, context: Tensor) -> Any:
    assert isinstance(module, EncoderDecoder)
    with torch.no_grad():
        return module.decoder.cache(), module.encode(context)


def _next_of_translation(module: nn.Module, x: Tensor, kept: Any, **asked: Any) -> Tensor:
    assert isinstance(module, EncoderDecoder)
    cache, states = kept
    with torch.no_grad():
        return module.decoder(x, states, cache=cache, **asked)


def _vision(module: Vision, source: str | None) -> Model:
    declared = module.spec
    block = declared.encoder.block
    return Model(
        f"regard.Vision, {declared.encoder.layers} layers {declared.d_model} wide",
        module,
        lambda module, images: module(images),
        of="vision",
        d_model=declared.d_model,
        image=(declared.channels, *declared.image),
        longest=declared.tokens,
        layers=declared.encoder.layers,
        heads=block.attention.heads,
        claims={"float64", "float32", "grad", "positions"}
        | ({"pooled"} if declared.head is not None else set()),
        source=source,
        imports=IMPORTS,
    )


def silence(module: nn.Module) -> None:
    """0 for what every branch adds."""
    with torch.no_grad():
        for part in module.modules():
            last = part.w_o if isinstance(part, MultiHeadAttention) else None
            if isinstance(part, FeedForward):
                last = part.w_out
            if isinstance(last, nn.Linear):
                last.weight.zero_()
                if last.bias is not None:
                    last.bias.zero_()


def _words(
    declared: spec.Attention, able: set[str], embedding: spec.Embedding | None = None, cache: bool = True
) -> dict[str, Any]:
    """claims, lacks and alignment: what a declared attention says about the model around it."""
    claims = {*able, "float64", "float32", "grad"}
    past = (declared.pattern - patterns.causal()).count(64) == 0
    if past:
        claims |= {"always causal"} | (
            {"cache"} if cache and declared.sizes.d_out == declared.d_model else set()
        )
    seen = declared.position is not None or getattr(embedding, "position", None) is not None
    if declared.position is not None:
        claims |= {"positions", "relative positions"}
    elif seen:
        claims |= {"positions"}
    lacks = set() if seen or not isinstance(declared.pattern, full) else {"positions", "relative positions"}
    return {"claims": claims, "lacks": lacks, "alignment": "bottom-right"}


def _window(pattern: Pattern) -> tuple[int, int] | None:
    """(before, after) of a pattern that is a window, causal or not."""
    match pattern:
        case window(before, after):
            return before, before if after is None else after
        case Both(causal(), window(before, _)) | Both(window(before, _), causal()):
            return before, 0
    return None


def _longest(embedding: spec.Embedding | None) -> int:
    where = getattr(embedding, "position", None)
    if isinstance(where, learned) and isinstance(where.table, int):
        return min(64, where.table)
    return 64
