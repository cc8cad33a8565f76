"""regard itself: `rg.attention`, and the modules and models that specs build."""

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
from ...pattern import Both, Pattern, causal, full, per_head, window
from ...pattern.grid import grid_size
from ...position import learned
from ..target import Function, Model, Projections
from .seeded import seeded
from .small_specs import reduced

IMPORTS = "import regard as rg\nfrom regard.laws import adapters"
PROMISES = {
    *{
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float16 range",
        "grad",
        "double backward",
        "deterministic",
    },
    "grouped",
    *{"n≠m", "d_v≠d_k", "mask and causal", "empty rows", "nan under lengths"},
}
# Laws of these options call a model with more or fewer positions, too.
CALLS_OF_OTHER_LENGTHS = {"lengths", "documents", "nan under lengths"}


def regard_function(backend: str = "auto") -> Function:
    """rg.attention with the backend it chooses, or with a named one. It makes every promise but NaN under a mask."""

    def call(q, k, v, *, lse=False, weights=False, dropout_p=0.0, **options) -> Any:
        n, m = q.shape[-2], k.shape[-2]
        arguments = {
            name: options.pop(name, None) for name in ("bias", "scale", "softcap", "sink_logits", "lengths")
        }
        arguments["pattern"] = _pattern(n, m, **options)
        if isinstance(arguments["pattern"], Pattern) and n > m:
            arguments["at"] = m - n  # more queries than keys need an explicit query offset
        if weights:
            o = engine.attention(q, k, v, **arguments, backend=backend)
            return o, engine.weights(q, k, **arguments)
        return engine.attention(q, k, v, **arguments, dropout_p=dropout_p, return_lse=lse, backend=backend)

    options = {
        "mask",
        "causal",
        "scale",
        "softcap",
        "sink logits",
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
        claims=(options | PROMISES) - ({"softcap", "sink logits"} if backend == "sdpa" else set()),
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
    """All masks of a call as one pattern; as a table if one of them is a table."""
    parts: list[Pattern] = [patterns.causal()] if causal else []
    parts += [patterns.window(*window)] if window is not None else []
    parts += [patterns.documents(documents)] if documents is not None else []
    combined = None
    for part in parts:
        combined = part if combined is None else combined & part
    if allowed is None or combined is None:
        return combined if allowed is None else allowed
    return allowed & combined.allowed(n, m, at=m - n, device=allowed.device)


def regard_model(thing: spec.Spec | nn.Module) -> Model:
    """The module of a spec, reduced in size, newly initialized and without dropout; or a module built from a spec."""
    if isinstance(thing, spec.Spec):
        source = f"adapters.regard_model(rg.from_json({thing.json()!r}))"
        declared, note = reduced(thing)
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
    raise SpecError(f"{type(thing).__name__} contains no attention of regard, so no law applies")


def _attention(module: MultiHeadAttention, source: str | None) -> Model:
    declared, size = module.spec, module.spec.sizes
    supported = {
        "mask",
        "lengths",
        "documents",
        "weights",
        "nan under lengths",
        "empty rows",
        "deterministic",
    }
    if isinstance(declared.pattern, full):
        supported |= {"causal", "mask and causal"}
    if declared.position is None and isinstance(declared.pattern, full):
        supported |= {"context", "context lengths"}
    plain = declared.score == "dot" and declared.position is None and declared.factor is None
    plain = plain and declared.output and isinstance(declared.pattern, full)
    plain = plain and declared.softcap is None and not (declared.sink_logits or declared.extra_key)
    return Model(
        f"regard.{declared!r}",
        module,
        _call_attention,
        architecture="attention",
        d_model=size.d_model,
        d_context=size.d_context,
        heads=size.heads,
        layers=1,
        projections=_projections if plain else None,
        make_cache=lambda module, b, context=None: KeyValues(),
        decode=_decode,
        **_declarations(declared, supported),
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
    **options: Any,
) -> Any:
    n, m = x.shape[1], (x if context is None else context).shape[1]
    return module(
        x,
        context,
        lengths=lengths if context is None else context_lengths,
        pattern=_model_pattern(n, m, **options),
        return_weights=weights,
    )


def _model_pattern(n: int, m: int, *, allowed: Bool[Tensor, "..."] | None = None, **options: Any) -> Any:
    """The mask of a model is (b, n, m), the same for every head."""
    if allowed is not None and allowed.dim() == 3:
        allowed = rearrange(allowed, "b n m -> b 1 n m")
    return _pattern(n, m, allowed=allowed, **options)


def _decode(module: nn.Module, x: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        return module(x, cache=cache)


def _projections(module: nn.Module) -> Projections:
    """Views of the parameters, per head."""
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
    supported = {"mask", "lengths", "documents", "nan under lengths", "empty rows", "deterministic"}
    cross = {"context", "context lengths"} if declared.cross is not None else set()
    pre = declared.norm_at == "pre" and declared.residual
    return Model(
        f"regard.Block, {declared.d_model} wide",
        module,
        _call_stack,
        architecture="decoder" if cross else "encoder",
        d_model=declared.d_model,
        d_context=declared.cross.sizes.d_context if declared.cross else None,
        heads=declared.attention.heads,
        layers=1,
        zero_branches=zero_branches if pre else None,
        **_declarations(
            declared.attention, supported | cross | ({"pre-norm"} if pre else set()), cache=False
        ),
        source=source,
        imports=IMPORTS,
    )


def _stack(module: Stack, source: str | None) -> Model:
    declared = module.spec
    block = declared.block
    supported = {"mask", "lengths", "documents", "nan under lengths", "empty rows", "deterministic"}
    cross = {"context", "context lengths"} if block.cross is not None else set()
    pooled = isinstance(declared.head, spec.ClassifierHead | spec.Pooler)
    pre = block.norm_at == "pre" and block.residual and not declared.has_final_norm and declared.head is None
    pre = pre and declared.embedding is None
    attention = replace(block.attention, position=declared.position or block.attention.position)
    declarations = _declarations(
        attention, supported | cross | ({"pre-norm"} if pre else set()), declared.embedding
    )
    if pooled:
        declarations["claims"] = (declarations["claims"] - {"cache"}) | {"pooled"}
        if getattr(declared.head, "pool", "first") == "last":
            declarations["claims"] -= {"always causal"}
    return Model(
        f"regard.{type(declared).__name__}, {declared.layers} layers {declared.d_model} wide",
        module,
        _call_stack,
        architecture="decoder" if isinstance(declared, spec.Decoder) else "encoder",
        d_model=declared.d_model,
        vocab=None if declared.embedding is None else declared.embedding.vocab,
        d_context=None if block.cross is None else block.cross.sizes.d_context,
        max_length=_max_length(declared.embedding),
        layers=declared.layers,
        window=_window(block.attention.pattern),
        heads=block.attention.heads,
        make_cache=lambda module, b, context=None: (module.cache(), context),
        decode=_decode_stack,
        zero_branches=zero_branches if pre else None,
        **declarations,
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
    **options: Any,
) -> Tensor:
    pattern = _model_pattern(x.shape[1], x.shape[1], **options)
    arguments = {"lengths": lengths, "pattern": pattern}
    return (
        module(x)
        if context is None and not any(v is not None for v in arguments.values())
        else module(x, context, context_lengths=context_lengths, **arguments)
    )


def _decode_stack(module: nn.Module, x: Tensor, cache: Any, **options: Any) -> Tensor:
    key_values, context = cache
    with torch.no_grad():
        return module(x, context, cache=key_values, **options)


def _encoder_decoder(module: EncoderDecoder, source: str | None) -> Model:
    declared = module.spec
    decoder = declared.decoder
    attention = decoder.block.attention
    attention = replace(attention, position=decoder.position or attention.position)
    supported = {"lengths", "context", "context lengths", "nan under lengths", "empty rows", "deterministic"}
    tables = [e for e in (declared.encoder.embedding, decoder.embedding) if e is not None]
    return Model(
        f"regard.EncoderDecoder, {declared.encoder.layers} + {decoder.layers} layers {declared.d_model} wide",
        module,
        _translate,
        architecture="encoder-decoder",
        d_model=declared.d_model,
        vocab=min(e.vocab for e in tables) if tables else None,
        max_length=min(_max_length(e) for e in tables) if tables else 64,
        layers=decoder.layers,
        heads=attention.heads,
        make_cache=_translation_cache,
        decode=_decode_translation,
        **_declarations(attention, supported, decoder.embedding),
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


def _translation_cache(module: nn.Module, b: int, context: Tensor) -> Any:
    assert isinstance(module, EncoderDecoder)
    with torch.no_grad():
        return module.decoder.cache(), module.encode(context)


def _decode_translation(module: nn.Module, x: Tensor, cache: Any, **options: Any) -> Tensor:
    assert isinstance(module, EncoderDecoder)
    key_values, states = cache
    with torch.no_grad():
        return module.decoder(x, states, cache=key_values, **options)


def _vision(module: Vision, source: str | None) -> Model:
    declared = module.spec
    block = declared.encoder.block
    return Model(
        f"regard.Vision, {declared.encoder.layers} layers {declared.d_model} wide",
        module,
        lambda module, images: module(images),
        architecture="vision",
        d_model=declared.d_model,
        image=(declared.channels, *declared.image),
        max_length=declared.tokens,
        layers=declared.encoder.layers,
        heads=block.attention.heads,
        claims={"float64", "float32", "grad", "positions"}
        | ({"pooled"} if declared.head is not None else set()),
        source=source,
        imports=IMPORTS,
    )


def zero_branches(module: nn.Module) -> None:
    """Set the output of every residual branch to 0."""
    with torch.no_grad():
        for part in module.modules():
            last = part.w_o if isinstance(part, MultiHeadAttention) else None
            if isinstance(part, FeedForward):
                last = part.w_out
            if isinstance(last, nn.Linear):
                last.weight.zero_()
                if last.bias is not None:
                    last.bias.zero_()


def _declarations(
    declared: spec.Attention, supported: set[str], embedding: spec.Embedding | None = None, cache: bool = True
) -> dict[str, Any]:
    """claims, lacks, alignment and the only length, that follow from the attention spec of a model."""
    claims = {*supported, "float64", "float32", "grad"}
    length = grid_size(declared.pattern)
    if length is not None:  # every call has all positions of the grid
        claims, cache = claims - CALLS_OF_OTHER_LENGTHS, False
    past = (declared.pattern - patterns.causal()).count(length or 64) == 0
    if past:
        claims |= {"always causal"} | (
            {"cache"} if cache and declared.sizes.d_out == declared.d_model else set()
        )
    has_positions = declared.position is not None or getattr(embedding, "position", None) is not None
    if declared.position is not None:
        claims |= {"positions", "relative positions"}
    elif has_positions:
        claims |= {"positions"}
    if declared.pattern.shift_period != 1:  # every, sinks, blocks: it names positions itself
        claims = (claims - {"relative positions"}) | {"positions"}
    lacks = (
        set()
        if has_positions or not isinstance(declared.pattern, full)
        else {"positions", "relative positions"}
    )
    lacks |= set() if length is None else CALLS_OF_OTHER_LENGTHS
    return {"claims": claims, "lacks": lacks, "alignment": "bottom-right", "length": length}


def _window(pattern: Pattern) -> tuple[int, int] | None:
    """(before, after) of a pattern that is a window, causal or not."""
    match pattern:
        case window(before, after):
            return before, before if after is None else after
        case Both(causal(), window(before, _)) | Both(window(before, _), causal()):
            return before, 0
        case per_head(heads) if all(map(_window, heads)):  # what the widest of them reach
            before, after = zip(*map(_window, heads))
            return max(before), max(after)
    return None


def _max_length(embedding: spec.Embedding | None) -> int:
    position = getattr(embedding, "position", None)
    if isinstance(position, learned) and isinstance(position.table, int):
        return min(64, position.table)
    return 64
