"""Hugging Face configurations and models: built on meta tensors, with generated inputs and labels."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError

HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM", "ForPreTraining", "MTModel")
CLASSIFIERS = ("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")


def is_config(model: Any) -> bool:
    return hasattr(model, "model_type") and hasattr(model, "to_dict") and not isinstance(model, nn.Module)


def is_class(model: Any) -> bool:
    return inspect.isclass(model) and hasattr(model, "config_class")


def build(config: Any) -> nn.Module:
    """The model of a configuration on meta tensors, of the architecture that it names if any."""
    try:
        import transformers
    except ModuleNotFoundError as missing:
        raise SpecError(
            "a Hugging Face configuration needs transformers: pip install 'regard[huggingface]'"
        ) from missing
    name = (getattr(config, "architectures", None) or [None])[0]
    kind = getattr(transformers, name, None) if name else None
    if name and kind is None:
        raise SpecError(
            f"transformers {transformers.__version__} has no {name}: upgrade it, or leave architectures out of the "
            f"configuration"
        )
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config) if kind is None else kind(config)
    return model.eval()


def generated_inputs(
    model: nn.Module, n: int, m: int | None, batch: int, labels: bool = False
) -> dict[str, Tensor]:
    """Inputs of the right shapes: pixels, sound or token ids; for an encoder-decoder source and target ids.

    labels: also what the model's own loss compares with, where it has one.
    """
    config: Any = model.config
    main, name = getattr(model, "main_input_name", "input_ids"), type(model).__name__
    if main == "pixel_values" and not hasattr(config, "vocab_size"):
        side = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        given = {main: torch.empty(batch, config.num_channels, side, side, device="meta")}
        return given | ({"labels": _ids(batch)} if labels and name.endswith(CLASSIFIERS) else {})
    if main == "input_values":
        return {main: torch.empty(batch, n, device="meta")}
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    given = {"input_ids": _ids(batch, (m or n) if encodes else n)}
    scored = labels and name.endswith(HEADS)
    if scored:
        given["labels"] = _ids(batch, n)
    elif labels and name.endswith(CLASSIFIERS):
        given["labels"] = _ids(batch)
    if encodes and not scored:
        given["decoder_input_ids"] = _ids(batch, n)
    return given


def _ids(*size: int) -> Tensor:
    return torch.ones(size, dtype=torch.long)
