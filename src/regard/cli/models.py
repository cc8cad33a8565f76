"""Models and inputs by their names on the command line and on the page of `regard serve`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

from .. import spec
from ..errors import FormatError, SpecError
from ..files import read_checked, read_text
from ..generation import generate
from ..nn import stack
from ..training.data.tokens import END, START, Tokens
from ..training.recipes.run import MODEL, RECIPE, TOKENS
from . import targets

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


class LoadedModel(NamedTuple):
    """A model with its tokenizer and configuration."""

    model: nn.Module | Callable[..., Any]
    tokenizer: Any
    config: Any  # a Hugging Face configuration, a regard spec, or None
    python: str = ""  # the line that gives the same model in Python


def load(source: str) -> LoadedModel:
    """The model that `source` names, ready to run; random weights are announced."""
    target = targets.read(source)
    folder = Path(source.removeprefix("hf:"))
    if isinstance(target, spec.Spec):
        typer.echo(f"{source} is a declaration: its weights are random, not trained", err=True)
        declared = f"regard.preset({source!r})" if source in spec.presets() else f"read({source!r})"
        read = "" if source in spec.presets() else "from regard.cli.targets import read; "
        return LoadedModel(target.build().eval(), None, target, f"{read}model = {declared}.build()")
    if hasattr(target, "model_type"):
        return _huggingface(target, folder if folder.is_dir() else folder.parent)
    module, _, name = source.partition(":")
    where = Path(module).stem if module.endswith(".py") else module
    if isinstance(target, nn.Module):
        path = folder / MODEL if (folder / RECIPE).is_file() else folder
        line = f"from {where} import {name} as model" if name else f"model = regard.load({str(path)!r})"
        return LoadedModel(target.eval(), _own_tokenizer(folder), getattr(target, "spec", None), line)
    if not callable(target):
        raise SpecError(
            f"{source} is a {type(target).__name__}; expected a model, or a function that returns one"
        )
    try:
        model = target()
    except Exception as e:  # foreign code may raise anything
        raise SpecError(
            f"{source}() raised {type(e).__name__}: {e}; expected a model, or a function without arguments that "
            "returns one"
        ) from e
    if not isinstance(model, nn.Module):
        raise SpecError(f"{source}() returned a {type(model).__name__}; expected a model (an nn.Module)")
    line = f"from {where} import {name}; model = {name}()"
    return LoadedModel(model.eval(), None, getattr(model, "config", getattr(model, "spec", None)), line)


def included_translator() -> LoadedModel:
    """The translator that is part of regard."""
    from ..training.translator import open_translator

    net, tokens, _ = open_translator()
    line = "from regard.training.translator import open_translator; model, tokens, _ = open_translator()"
    return LoadedModel(net, tokens, net.spec, line)


def _huggingface(config: Any, folder: Path) -> LoadedModel:
    import transformers
    from transformers import AutoTokenizer

    name = "AutoModel"
    if type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        name = "AutoModelForSeq2SeqLM"
    elif any(a.endswith(("ForCausalLM", "LMHeadModel")) for a in config.architectures or ()):
        name = "AutoModelForCausalLM"  # its weights have a language head
    kind: Any = getattr(transformers, name)
    where = repr(str(folder))
    if any((folder / name).is_file() for name in WEIGHTS):
        model = kind.from_pretrained(str(folder), local_files_only=True)
        line = f"from transformers import {name}; model = {name}.from_pretrained({where})"
    else:
        typer.echo(f"{folder} has no weights: they are random, not trained", err=True)
        model = kind.from_config(config)
        config_line = f"AutoConfig.from_pretrained({where})"
        line = f"from transformers import AutoConfig, {name}; model = {name}.from_config({config_line})"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if not tokenizer.encode("a word", add_special_tokens=False):
            tokenizer = None  # a folder without its files gives a tokenizer without a vocabulary
    except (OSError, ValueError, ImportError, KeyError, TypeError):
        tokenizer = None
    return LoadedModel(model.eval(), tokenizer, config, line)


def _own_tokenizer(folder: Path) -> Any:
    """The tokens of a training run, or the tokenizer.json beside a regard checkpoint, if there is one."""
    if (folder / TOKENS).is_file():
        return Tokens.from_json(read_checked(folder, TOKENS))
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as e:
        raise SpecError(f"{path} needs the tokenizers library: pip install tokenizers") from e
    return Tokenizer.from_file(str(path))


def namer(tokenizer: Any) -> Any:
    """What maps ids to token names: a Hugging Face tokenizer itself, a function for the others."""
    if isinstance(tokenizer, Tokens):
        return tokenizer.words
    if tokenizer is None or hasattr(tokenizer, "convert_ids_to_tokens"):
        return tokenizer
    return lambda ids: [tokenizer.id_to_token(i) for i in ids]


def token_names(tokenizer: Any, ids: list[int]) -> list[str]:
    """The tokens of these ids, or the ids themselves where the model has no tokenizer."""
    if tokenizer is None:
        return [str(i) for i in ids]
    return (
        namer(tokenizer)(ids)
        if not hasattr(tokenizer, "convert_ids_to_tokens")
        else tokenizer.convert_ids_to_tokens(ids)
    )


def read_input(given: str, loaded: LoadedModel) -> Tensor:
    """The input as token ids (1, n), or as an image or array (1, …)."""
    path = Path(given)
    if given.startswith("random:"):
        return _random(given, loaded)
    if given and all(part.strip().isdecimal() for part in given.split(",")):
        return torch.tensor([[int(part) for part in given.split(",")]])
    if path.suffix.lower() in IMAGES:
        return _image(path, loaded)
    if path.suffix.lower() == ".npy":
        return _array(path, loaded)
    if len(given) < 1024 and path.is_file():
        given = read_text(path)
    if loaded.tokenizer is None:
        raise SpecError(
            f"this model has no tokenizer, so {given[:40]!r} is not an input; use token ids, such as 5,12,7"
        )
    if not (ids := encoded(given, loaded.tokenizer)):
        raise SpecError(f"{given!r} has no tokens; pass a text")
    return torch.tensor([ids])


def encoded(text: str, tokenizer: Any) -> list[int]:
    """The ids of a text, from any of the three kinds of tokenizers."""
    if isinstance(tokenizer, Tokens):
        return tokenizer.encode([text])[0]
    ids = tokenizer.encode(text)
    return ids if isinstance(ids, list) else ids.ids


def _random(given: str, loaded: LoadedModel) -> Tensor:
    if not (count := given.removeprefix("random:")).isdecimal() or int(count) < 1:
        raise FormatError(f"{given!r}: write random:64 for 64 random tokens")
    if size := image_size(loaded.config):
        return torch.rand(1, *size)
    return torch.randint(0, vocabulary(loaded), (1, int(count)))


def vocabulary(loaded: LoadedModel) -> int:
    """The vocabulary size of the model."""
    declared = getattr(loaded.config, "encoder", loaded.config)
    size = getattr(loaded.config, "vocab_size", getattr(getattr(declared, "embedding", None), "vocab", None))
    if size is None and isinstance(loaded.model, nn.Module):
        tables = [m for m in loaded.model.modules() if isinstance(m, nn.Embedding)]
        size = max((t.num_embeddings for t in tables), default=None)
    if size is None:
        raise SpecError(
            "this model has no token embedding, so random ids are not an input; use an array (.npy)"
        )
    return int(size)


def image_size(config: Any) -> tuple[int, int, int] | None:
    """(channels, height, width) of a vision model's input."""
    if isinstance(config, spec.Vision):
        return config.channels, *config.image
    size = getattr(config, "image_size", None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(config, "num_channels", 3), height, width


def _image(path: Path, loaded: LoadedModel) -> Tensor:
    try:
        from PIL import Image
    except ModuleNotFoundError as e:
        raise SpecError(f"{path} is an image; pip install 'regard[figures]'") from e
    size = image_size(loaded.config)
    if size is None:
        raise SpecError(f"{path} is an image, and the configuration of this model has no image size")
    try:
        image = Image.open(path).convert("L" if size[0] == 1 else "RGB").resize((size[2], size[1]))
    except OSError as e:
        raise FormatError(f"cannot read {path} as an image: {e}") from e
    pixels = torch.tensor(list(image.tobytes()), dtype=torch.float32).reshape(size[1], size[2], -1)
    return ((pixels.permute(2, 0, 1) / 255 - 0.5) / 0.5)[None]


def _array(path: Path, loaded: LoadedModel) -> Tensor:
    """The array of a file; numbers with a fraction, which numpy stores as float64, in the dtype of the weights."""
    import numpy

    try:
        x = torch.from_numpy(numpy.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError, EOFError) as e:
        raise FormatError(f"cannot read {path} as an array: {e}") from e
    if x.dim() < 2:
        raise FormatError(
            f"{path} has the shape {tuple(x.shape)}; the first axis of an input is the batch: (1, n) for token ids, "
            "(1, n, d) for vectors"
        )
    weights = loaded.model.parameters() if isinstance(loaded.model, nn.Module) else ()
    dtype = next((w.dtype for w in weights if w.is_floating_point()), x.dtype)
    return x.to(dtype) if x.is_floating_point() else x


def has_decoder_input(loaded: LoadedModel) -> bool:
    """Whether the model is an encoder-decoder, whose decoder reads a text of its own."""
    return isinstance(loaded.model, stack.EncoderDecoder) or bool(
        getattr(loaded.config, "is_encoder_decoder", False)
    )


def own_output(loaded: LoadedModel, ids: Tensor) -> Tensor:
    """What an encoder-decoder generates greedily for a source, including its start token (1, n)."""
    length = 2 * ids.shape[1] + 10
    if isinstance(loaded.model, stack.EncoderDecoder):
        result = generate(
            loaded.model, [[START]], source=ids, max_new_tokens=length, eos_id=END, return_log_probs=False
        )
        return torch.tensor([[START, *result.rows()[0]]])
    model: Any = loaded.model
    if not hasattr(model, "generate") or not model.can_generate():
        raise SpecError(
            f"{type(model).__name__} is an encoder-decoder that does not generate; give the decoder's input with "
            f"--target"
        )
    return model.generate(ids, max_new_tokens=length, do_sample=False, num_beams=1)


def arguments(loaded: LoadedModel, ids: Tensor, after: Tensor | None) -> Any:
    """The arguments of the model's forward; after: the input of the decoder of an encoder-decoder."""
    if not hasattr(loaded.config, "model_type"):
        return ids if after is None else (ids, after)
    if ids.is_floating_point():
        return {"pixel_values": ids}
    named = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if after is not None:
        named["decoder_input_ids"] = after
    return named
