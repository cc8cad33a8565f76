"""Export of an encoder-decoder to CTranslate2: the same weights and tables, so the same translations.

CTranslate2 runs encoder-decoders in C++ without PyTorch. Every weight is copied unchanged; positions are written
as a table, so that no formula needs to agree. What CTranslate2 cannot express is an error that names it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import spec
from ..errors import FormatError, RegardError, SpecError
from ..nn.attention import MultiHeadAttention
from ..nn.block import Block
from ..nn.embedding import LanguageHead
from ..nn.stack import EncoderDecoder, Stack
from ..pattern import causal, full
from ..position import learned, sinusoid, sinusoidal

ACTIVATIONS = {  # ours, theirs
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_tanh": "GELUTanh",
    "silu": "SWISH",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "swiglu": "SWISH",
    "geglu": "GELU",
}


def to_ctranslate2(
    model: nn.Module,
    words: Sequence[str],
    folder: str | Path,
    *,
    start: str = "<s>",
    end: str = "</s>",
    unknown: str = "<unk>",
    positions: int = 1024,
) -> Path:
    """Write model.bin, config.json and the vocabulary to a new folder; `ctranslate2.Translator` opens it.

    words: the token of each id. positions: how long a sentence may be, where the positions are sinusoids (a
    learned table has its own end).
    """
    if not isinstance(model, EncoderDecoder):
        raise SpecError(f"CTranslate2 takes an EncoderDecoder here, not {type(model).__name__}")
    _check(model.spec)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FormatError(f"{folder} is not empty; give a new folder")
    library = _library()
    encoder, decoder = _stack(library, model.encoder), _stack(library, model.decoder)
    made = library.specs.TransformerSpec(encoder, decoder)
    for theirs, stack in ((encoder, model.encoder), (decoder, model.decoder)):
        _fill(theirs, stack, positions)
    _fill_head(decoder.projection, model.decoder)
    made.register_source_vocabulary(_as_many(words, len(model.encoder.embedding.table)))
    made.register_target_vocabulary(_as_many(words, len(model.decoder.embedding.table)))
    made.config.bos_token, made.config.eos_token, made.config.unk_token = start, end, unknown
    made.config.decoder_start_token = start
    made.config.layer_norm_epsilon = model.spec.decoder.block.epsilons[0]
    made.validate()
    made.optimize()  # tied weights are stored once
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder))
    return folder


def _check(model: spec.EncoderDecoder) -> None:
    """Refuse what a TransformerSpec of CTranslate2 cannot express."""
    eps = model.decoder.block.epsilons[0]
    for side, stack, seen in (("encoder", model.encoder, full()), ("decoder", model.decoder, causal())):
        block, embedding = stack.block, stack.embedding
        _need(side, embedding is not None, "no embedding", "it reads token ids")
        assert embedding is not None
        _need(side, embedding.types == 0, f"types={embedding.types}", "it has no token types")
        place = embedding.position
        fits = place is None or (isinstance(place, sinusoidal | learned) and place.grid is None)
        _need(side, fits, f"position={place!r}", "it takes sinusoidal() or learned(n)")
        _need(
            side,
            getattr(place, "beyond", "refuse") == "refuse",
            f"position={place!r}",
            "its table is not resampled",
        )
        _need(
            side, stack.position is None, f"position={stack.position!r}", "positions are added to the input"
        )
        _need(side, block.feed_forward is not None, "feed_forward=None", "every block has one")
        if block.feed_forward is not None:
            name = block.feed_forward.activation
            _need(side, name in ACTIVATIONS, f"activation={name!r}", f"it has {', '.join(ACTIVATIONS)}")
        _need(side, block.residual, "residual=False", "every branch is added to its input")
        _need(side, block.norm in ("layer", "rms"), f"norm={block.norm!r}", "it has layer and rms norms")
        epsilons = {*block.epsilons, embedding.eps if embedding.norm else eps, stack.norm_eps, eps}
        _need(side, len(epsilons) == 1, f"eps={', '.join(map(str, sorted(epsilons)))}", "all norms share one")
        plain = not embedding.norm or block.norm == "layer"
        _need(side, plain, f"norm={block.norm!r} after an embedding with a layer norm", "it has one kind")
        _check_attention(side, block.attention, seen, block.attention.heads)
        if block.cross is not None:
            _check_attention(side, block.cross, full(), block.attention.heads)
    _need("decoder", isinstance(model.decoder.head, spec.LanguageHead), "no LanguageHead", "it gives logits")


def _check_attention(side: str, a: spec.Attention, pattern: Any, heads: int) -> None:
    size = a.sizes
    _need(side, a.score == "dot", f"score={a.score!r}", "it compares by dot products")
    _need(side, a.pattern == pattern, f"pattern={a.pattern!r}", f"its pattern is {pattern!r}")
    _need(side, a.position is None, f"position={a.position!r}", "positions are added to the input")
    _need(
        side, a.factor is None or 0 < a.factor < torch.inf, f"scale={a.factor}", "it takes a number above 0"
    )
    _need(side, size.kv_heads == size.heads, f"kv_heads={a.kv_heads}", "every head has its own keys")
    _need(side, size.heads == heads, f"heads={size.heads} and {heads}", "a stack has one number of heads")
    _need(side, a.softcap is None, f"softcap={a.softcap}", "its scores have no cap")
    _need(side, not a.sink_logits, "sink_logits=True", "its softmax is over keys alone")
    _need(side, not a.extra_key, "extra_key=True", "its keys are those of the input")
    _need(side, size.d_values == size.d_context, f"d_values={a.d_values}", "keys and values have one input")
    _need(side, a.output, "output=False", "it always has an output projection")
    width = size.d_model // size.heads
    same = size.d_k == size.d_v == width
    _need(side, same, f"d_k={size.d_k}, d_v={size.d_v}", f"d_model / heads = {width} is what it has")


def _need(side: str, ok: bool, what: str, why: str) -> None:
    if not ok:
        raise SpecError(f"CTranslate2 cannot run the {side}'s {what}: {why}")


def _stack(library: Any, stack: Stack) -> Any:
    """Their declaration of ours, without weights."""
    declared = stack.spec
    block, mlp, embedding = declared.block, declared.block.feed_forward, declared.embedding
    assert mlp is not None and embedding is not None
    kind = "TransformerEncoderSpec" if block.cross is None else "TransformerDecoderSpec"
    theirs = getattr(library.specs, kind)(
        declared.layers,
        block.attention.heads,
        no_final_norm=not declared.has_final_norm,
        activation=library.specs.Activation[ACTIVATIONS[mlp.activation]],
        layernorm_embedding=embedding.norm,
        ffn_glu=mlp.gated,
        rms_norm=block.norm == "rms",
    )
    theirs.pre_norm = block.norm_at == "pre"  # set last: post-norm stacks may have a final norm too
    theirs.scale_embeddings = float(embedding.d_model**0.5) if embedding.scaled else 1.0
    return theirs


def _fill(theirs: Any, stack: Stack, positions: int) -> None:
    table = stack.embedding
    first = theirs.embeddings[0] if isinstance(theirs.embeddings, list) else theirs.embeddings
    first.weight = _float(table.table)
    theirs.position_encodings.encodings = _positions(stack, positions)
    if stack.spec.has_final_norm:
        _fill_norm(theirs.layer_norm, stack.norm)
    if table.spec.norm:
        _fill_norm(theirs.layernorm_embedding, table.norm)
    for layer, block in zip(theirs.layer, stack.blocks, strict=True):
        assert isinstance(block, Block)
        _fill_attention(layer.self_attention, block.attention, block.attention_norm, at_once=3)
        if block.spec.cross is not None:
            _fill_attention(layer.attention, block.cross, block.cross_norm, at_once=1)
        mlp = block.feed_forward
        _fill_norm(layer.ffn.layer_norm, block.feed_forward_norm)
        if mlp.w_gate is None:
            _fill_linear(layer.ffn.linear_0, mlp.w_in)
        else:  # theirs names the gated half first
            _fill_linear(layer.ffn.linear_0, mlp.w_gate)
            _fill_linear(layer.ffn.linear_0_noact, mlp.w_in)
        _fill_linear(layer.ffn.linear_1, mlp.w_out)


def _fill_attention(theirs: Any, ours: MultiHeadAttention, norm: nn.Module, at_once: int) -> None:
    """One product computes q, k and v of a sequence; only q where the keys are those of a context."""
    parts = [ours.w_q, ours.w_k, ours.w_v]
    _fill_linear(theirs.linear[0], *parts[:at_once])
    if at_once < 3:
        _fill_linear(theirs.linear[1], *parts[at_once:])
    _fill_linear(theirs.linear[-1], ours.w_o)
    if ours.spec.factor is not None:
        theirs.queries_scale = float(ours.spec.factor)
    _fill_norm(theirs.layer_norm, norm)


def _fill_linear(theirs: Any, *ours: nn.Linear | None) -> None:
    layers = [layer for layer in ours if layer is not None]
    theirs.weight = _float(torch.cat([layer.weight for layer in layers]))
    if layers[0].bias is not None:
        theirs.bias = _float(torch.cat([layer.bias for layer in layers]))


def _fill_norm(theirs: Any, ours: Any) -> None:
    theirs.gamma = _float(ours.weight)
    if hasattr(theirs, "beta"):
        theirs.beta = _float(torch.zeros_like(ours.weight) if ours.bias is None else ours.bias)


def _fill_head(theirs: Any, decoder: Stack) -> None:
    assert isinstance(decoder.head, LanguageHead)
    table = decoder.embedding.table if decoder.head.table is None else decoder.head.table
    theirs.weight = _float(table * decoder.head.factor)
    if decoder.head.bias is not None:
        theirs.bias = _float(decoder.head.bias)


def _positions(stack: Stack, longest: int) -> Tensor:
    """What is added at each position."""
    declared, table = stack.embedding.spec, stack.embedding
    match declared.position:
        case sinusoidal(base=base, order=order):
            return sinusoid(torch.arange(longest), declared.d_model, base, order, torch.float32)
        case learned():
            return _float(table.position.table)
    return torch.zeros(longest, declared.d_model)


def _float(weight: Tensor) -> Tensor:
    return weight.detach().to("cpu", torch.float32).contiguous()


def _as_many(words: Sequence[str], vocab: int) -> list[str]:
    """A name for every row of the table; rows past the words are never read, and have names all the same."""
    if len(words) > vocab:
        raise FormatError(f"{len(words)} words and a model of {vocab}; these are another model's words")
    return [*words, *(f"<unused{i}>" for i in range(len(words), vocab))]


def _library() -> Any:
    try:
        import ctranslate2
        import ctranslate2.specs
    except ModuleNotFoundError as e:
        raise RegardError("this export needs ctranslate2: pip install 'regard[export]'") from e
    return ctranslate2
