"""Hugging Face models, from a configuration or as they are: BERT, GPT-2, Llama, T5, Marian, ViT and their kin."""

import copy
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ...errors import SpecError
from ...nn import stack
from ..target import Model
from .seeded import seeded

IMPORTS = "from regard.laws import adapters"

# Sizes at which the code of a model can be judged in seconds; a smaller one stays as it is.
SMALL = {
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
DROPS = ("dropout", "pdrop", "dropout_prob", "dropout_rate", "layerdrop")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
INSIDE_FLOAT32 = ("llama", "mistral", "t5", "gemma", "qwen")  # norms or softmax in float32, whatever comes in


def hugging_face(thing: Any, *, attention: str = "sdpa", with_mask: bool = True) -> Model:
    """A model of transformers, or one built at a small size from a configuration, without dropout.

    attention: "sdpa" or "eager". with_mask: packed documents come as position ids that start again, beside a
    mask of ones as tokenizers give it (or, if False, without a mask and without a cache).
    """
    from transformers import PretrainedConfig, PreTrainedModel

    source, note = None, ""
    if isinstance(thing, PretrainedConfig):
        config, note = small(thing)
        said = f"transformers.{type(thing).__name__}.from_dict({thing.to_diff_dict()!r})"
        source = f"adapters.hugging_face({said}, attention={attention!r}, with_mask={with_mask})"
        thing = seeded(lambda: _class(config).from_config(config, attn_implementation=attention))
    if not isinstance(thing, PreTrainedModel):
        raise SpecError(f"{type(thing).__name__} is neither a model nor a configuration of transformers")
    config = thing.config
    name = f"transformers {type(thing).__name__} ({config._attn_implementation}{note})"
    if "pixel_values" in _takes(thing):
        return _vision(thing, name, source)
    if config.is_encoder_decoder:
        return _encoder_decoder(thing, name, source)
    return _one_stack(thing, name, source, with_mask)


def small(config: Any) -> tuple[Any, str]:
    """The configuration without dropout, its sizes cut to those of SMALL, and what was cut in words."""
    config, cut = copy.deepcopy(config), []
    for field, most in SMALL.items():
        value = getattr(config, field, None)
        if isinstance(value, int) and value > most:
            setattr(config, field, most)
            cut.append(field)
    for field, value in list(config.to_dict().items()):
        if field.endswith(DROPS) and isinstance(value, float):
            setattr(config, field, 0.0)
        if field in SPECIAL and isinstance(value, int) and value >= getattr(config, "vocab_size", 0):
            setattr(config, field, 0)
    heads = getattr(config, "num_attention_heads", None)
    if getattr(config, "num_key_value_heads", None) is not None and heads is not None:
        config.num_key_value_heads = min(config.num_key_value_heads, heads)
    config.use_cache = getattr(config, "use_cache", False)
    return config, ", cut to a small size" if cut else ""


def _class(config: Any) -> Any:
    """The class with a head of words where there is one: logits say more than states."""
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


def _takes(model: nn.Module) -> set[str]:
    from inspect import signature

    return set(signature(model.forward).parameters)


def _one_stack(model: Any, name: str, source: str | None, with_mask: bool) -> Model:
    """BERT and its kin look both ways; GPT-2, Llama and theirs back alone."""
    config, takes = model.config, _takes(model)
    decodes = config.model_type not in ENCODERS
    places = "position_ids" in takes
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
    claims = {"lengths", "float32", "grad", "positions"}
    if places:
        claims |= {"left padding"}
    if rotary:
        claims |= {"relative positions", "shift"}
    if decodes:
        claims |= {"always causal", "cache"} | ({"documents"} if places else set())

    def call(module, x, context=None, *, lengths=None, pads=None, documents=None, shift=0):
        given: dict[str, Any] = {}
        if lengths is not None or pads is not None:
            given["attention_mask"] = seen(x.shape[1], lengths, pads, x.device)
        if pads is not None:
            given["position_ids"] = (given["attention_mask"].cumsum(1) - 1).clamp(min=0)
        if documents is not None:
            given["position_ids"] = stack.places(documents)
            given |= {"attention_mask": torch.ones_like(x)} if with_mask else {"use_cache": False}
        if shift:
            given["position_ids"] = torch.arange(shift, shift + x.shape[1], device=x.device)[None]
        return _read(module(input_ids=x, **given))

    return Model(
        name,
        model.eval(),
        call,
        of="decoder" if decodes else "encoder",
        vocab=config.vocab_size,
        longest=min(64, getattr(config, "max_position_embeddings", None) or 64),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        start=(lambda module, b, context=None: {}) if decodes else None,
        step=_next if decodes else None,
        claims=claims,
        lacks=_inside(config),
        source=source,
        imports=f"import transformers\n{IMPORTS}",
    )


def _next(module: nn.Module, x: Int[Tensor, "b n"], kept: dict[str, Any], **asked: Any) -> Tensor:
    """The outputs of the new tokens; the cache is made by the first of them."""
    out = module(input_ids=x, use_cache=True, past_key_values=kept.get("past"))
    kept["past"] = out.past_key_values
    return _read(out)


def _encoder_decoder(model: Any, name: str, source: str | None) -> Model:
    """T5 and Marian: x is the target, the context its source."""
    config = model.config

    def call(module, x, context, *, lengths=None, context_lengths=None):
        given: dict[str, Any] = {}
        if lengths is not None:
            given["decoder_attention_mask"] = seen(x.shape[1], lengths, None, x.device)
        if context_lengths is not None:
            given["attention_mask"] = seen(context.shape[1], context_lengths, None, x.device)
        return _read(module(input_ids=context, decoder_input_ids=x, **given))

    def start(module, b, context):
        with torch.no_grad():
            return {"encoder_outputs": module.get_encoder()(input_ids=context)}

    def step(module, x, kept):
        given = {"encoder_outputs": kept["encoder_outputs"], "past_key_values": kept.get("past")}
        out = module(decoder_input_ids=x, use_cache=True, **given)
        kept["past"] = out.past_key_values
        return _read(out)

    return Model(
        name,
        model.eval(),
        call,
        of="encoder-decoder",
        vocab=config.vocab_size,
        longest=min(64, getattr(config, "max_position_embeddings", None) or 64),
        layers=getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None),
        heads=config.num_attention_heads,
        start=start,
        step=step,
        claims={
            *{"lengths", "context", "context lengths", "float32", "grad", "positions"},
            *{"always causal", "cache"},
        },
        lacks=_inside(config),
        source=source,
        imports=f"import transformers\n{IMPORTS}",
    )


def _vision(model: Any, name: str, source: str | None) -> Model:
    config = model.config
    side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
    return Model(
        name,
        model.eval(),
        lambda module, images: _read(module(pixel_values=images)),
        of="vision",
        d_model=config.hidden_size,
        image=(config.num_channels, side, side),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        claims={"float32", "grad", "positions"},
        lacks=_inside(config),
        source=source,
        imports=f"import transformers\n{IMPORTS}",
    )


def _inside(config: Any) -> set[str]:
    """What is computed in float32 whatever comes in cannot be judged in float64."""
    return {"float64"} if config.model_type.startswith(INSIDE_FLOAT32) else set()


def _read(out: Any) -> Tensor:
    return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state


def seen(
    n: int, lengths: Int[Tensor, " b"] | None, pads: Int[Tensor, " b"] | None, device: torch.device
) -> Int[Tensor, "b n"]:
    """The attention mask of transformers: 1 = real, 0 = padding."""
    j = torch.arange(n, device=device)
    real = j < lengths[:, None] if lengths is not None else j >= 0
    return (real if pads is None else real & (j >= pads[:, None])).long()
