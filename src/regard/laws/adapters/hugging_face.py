"""Hugging Face models, from a configuration or already built: BERT, GPT-2, Llama, T5, Marian, ViT and others."""

import copy
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ...errors import SpecError
from ...pattern.packed import document_positions
from ..target import Model
from .seeded import seeded

IMPORTS = "from regard.laws import adapters"

# The largest sizes that can be checked in seconds; smaller ones are left as they are.
MAX_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), 61),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "num_key_value_heads": 2,
    "d_kv": 8,
    "head_dim": 8,
    "num_decoder_layers": 2,
    "image_size": 8,
    "patch_size": 2,
}
DROPOUT_SUFFIXES = ("dropout", "pdrop", "dropout_prob", "dropout_rate", "layerdrop")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
FLOAT32_INSIDE = (
    "llama",
    "mistral",
    "t5",
    "gemma",
    "qwen",
)  # norms or softmax in float32 for every input dtype


def hugging_face(thing: Any, *, attention: str = "sdpa", with_mask: bool = True) -> Model:
    """A model of transformers, or a small one built from a configuration, without dropout.

    attention: "sdpa", "eager" or another registered implementation. with_mask: packed documents are given as position
    ids that restart at 0, together with a mask of ones, as tokenizers return it (if False, without a mask and without
    a cache).
    """
    from transformers import PretrainedConfig, PreTrainedModel

    source, note = None, ""
    if isinstance(thing, PretrainedConfig):
        config, note = reduced(thing)
        code = f"transformers.{type(thing).__name__}.from_dict({thing.to_diff_dict()!r})"
        source = f"adapters.hugging_face({code}, attention={attention!r}, with_mask={with_mask})"
        thing = seeded(lambda: _auto_class(config).from_config(config, attn_implementation=attention))
    if not isinstance(thing, PreTrainedModel):
        raise SpecError(f"{type(thing).__name__}: expected a model or a configuration of transformers")
    config = thing.config
    name = f"transformers {type(thing).__name__} ({config._attn_implementation}{note})"
    if "pixel_values" in _parameters(thing):
        return _vision(thing, name, source)
    if config.is_encoder_decoder:
        return _encoder_decoder(thing, name, source)
    return _one_stack(thing, name, source, with_mask)


def reduced(config: Any) -> tuple[Any, str]:
    """The configuration without dropout, its sizes limited to MAX_SIZES, and a note if it was reduced."""
    config, changed = copy.deepcopy(config), False
    for field, limit in MAX_SIZES.items():
        value = getattr(config, field, None)
        if isinstance(value, int) and value > limit:
            setattr(config, field, limit)
            changed = True
    for field, value in list(config.to_dict().items()):
        if field.endswith(DROPOUT_SUFFIXES) and isinstance(value, float):
            setattr(config, field, 0.0)
        if field in TOKEN_IDS and isinstance(value, int) and value >= getattr(config, "vocab_size", 0):
            setattr(config, field, 0)
    heads = getattr(config, "num_attention_heads", None)
    if getattr(config, "num_key_value_heads", None) is not None and heads is not None:
        config.num_key_value_heads = min(config.num_key_value_heads, heads)
    config.use_cache = getattr(config, "use_cache", False)
    return config, ", reduced in size" if changed else ""


def _auto_class(config: Any) -> Any:
    """The class with a language-model head if there is one, since logits depend on more code than hidden states."""
    import transformers

    known = transformers.models.auto.modeling_auto
    for mapping, kind in (
        (known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, transformers.AutoModelForSeq2SeqLM),
        (known.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.AutoModelForCausalLM),
    ):
        decodes = config.is_encoder_decoder or config.model_type not in ENCODERS
        if decodes and type(config) in mapping:
            return kind
    return transformers.AutoModel


ENCODERS = (
    "bert",
    "roberta",
    "distilbert",
    "electra",
    "albert",
    "deberta",
    "camembert",
    "xlm-roberta",
    "mpnet",
)


def _parameters(model: nn.Module) -> set[str]:
    from inspect import signature

    return set(signature(model.forward).parameters)


def _one_stack(model: Any, name: str, source: str | None, with_mask: bool) -> Model:
    """Encoders such as BERT, and causal decoders such as GPT-2 and Llama."""
    config, parameters = model.config, _parameters(model)
    decodes = config.model_type not in ENCODERS
    has_position_ids = "position_ids" in parameters
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    claims = {"lengths", "float32", "grad", "positions"}
    if has_position_ids:
        claims |= {"left padding"}
    if rotary:
        claims |= {"relative positions", "shift"}
    if decodes:
        claims |= {"always causal", "cache"} | ({"documents"} if has_position_ids else set())

    def call(module, x, context=None, *, lengths=None, left_padding=None, documents=None, shift=0):
        arguments: dict[str, Any] = {}
        if lengths is not None or left_padding is not None:
            arguments["attention_mask"] = padding_mask(x.shape[1], lengths, left_padding, x.device)
        if left_padding is not None:
            arguments["position_ids"] = (arguments["attention_mask"].cumsum(1) - 1).clamp(min=0)
        if documents is not None:
            arguments["position_ids"] = document_positions(documents)
            arguments |= {"attention_mask": torch.ones_like(x)} if with_mask else {"use_cache": False}
        if shift:
            arguments["position_ids"] = torch.arange(shift, shift + x.shape[1], device=x.device)[None]
        return _output(module(input_ids=x, **arguments))

    return Model(
        name,
        model.eval(),
        call,
        architecture="decoder" if decodes else "encoder",
        vocab=config.vocab_size,
        max_length=min(64, getattr(config, "max_position_embeddings", None) or 64),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        make_cache=(lambda module, b, context=None: {}) if decodes else None,
        decode=_decode if decodes else None,
        claims=claims,
        lacks=_missing_dtypes(config),
        source=source,
        imports=f"import transformers\n{IMPORTS}",
    )


def _decode(module: nn.Module, x: Int[Tensor, "b n"], cache: dict[str, Any]) -> Tensor:
    """The outputs of new tokens; the first call creates the cache."""
    out = module(input_ids=x, use_cache=True, past_key_values=cache.get("past"))
    cache["past"] = out.past_key_values
    return _output(out)


def _encoder_decoder(model: Any, name: str, source: str | None) -> Model:
    """T5 and Marian: x is the target sequence, the context is the source."""
    config = model.config

    def call(module, x, context, *, lengths=None, context_lengths=None):
        arguments: dict[str, Any] = {}
        if lengths is not None:
            arguments["decoder_attention_mask"] = padding_mask(x.shape[1], lengths, None, x.device)
        if context_lengths is not None:
            arguments["attention_mask"] = padding_mask(context.shape[1], context_lengths, None, x.device)
        return _output(module(input_ids=context, decoder_input_ids=x, **arguments))

    def make_cache(module, b, context):
        with torch.no_grad():
            return {"encoder_outputs": module.get_encoder()(input_ids=context)}

    def decode(module, x, cache):
        arguments = {"encoder_outputs": cache["encoder_outputs"], "past_key_values": cache.get("past")}
        out = module(decoder_input_ids=x, use_cache=True, **arguments)
        cache["past"] = out.past_key_values
        return _output(out)

    return Model(
        name,
        model.eval(),
        call,
        architecture="encoder-decoder",
        vocab=config.vocab_size,
        max_length=min(64, getattr(config, "max_position_embeddings", None) or 64),
        layers=getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None),
        heads=config.num_attention_heads,
        make_cache=make_cache,
        decode=decode,
        claims={
            *{"lengths", "context", "context lengths", "float32", "grad", "positions"},
            *{"always causal", "cache"},
        },
        lacks=_missing_dtypes(config),
        source=source,
        imports=f"import transformers\n{IMPORTS}",
    )


def _vision(model: Any, name: str, source: str | None) -> Model:
    config = model.config
    side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    return Model(
        name,
        model.eval(),
        lambda module, images: _output(module(pixel_values=images)),
        architecture="vision",
        d_model=config.hidden_size,
        image=(config.num_channels, side, side),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        claims={"float32", "grad", "positions"},
        lacks=_missing_dtypes(config),
        source=source,
        imports=f"import transformers\n{IMPORTS}",
    )


def _missing_dtypes(config: Any) -> set[str]:
    """A model that computes parts in float32 cannot be checked in float64."""
    return {"float64"} if config.model_type.startswith(FLOAT32_INSIDE) else set()


def _output(out: Any) -> Tensor:
    return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state


def padding_mask(
    n: int, lengths: Int[Tensor, " b"] | None, left_padding: Int[Tensor, " b"] | None, device: torch.device
) -> Int[Tensor, "b n"]:
    """The attention mask of transformers: 1 = real, 0 = padding."""
    j = torch.arange(n, device=device)
    real = j < lengths[:, None] if lengths is not None else j >= 0
    return (real if left_padding is None else real & (j >= left_padding[:, None])).long()
