"""`regard look`: the heads of anyone's model on one input."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

from .. import spec
from ..errors import FormatError, SpecError
from ..lens.text_table import Table
from ..lens.view import View
from ..lens.view import look as see
from ..nn import stack
from ..training.data.tokens import Tokens
from ..training.recipes.run import TOKENS
from . import targets

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
INPUT = "A text, a file of text, an image file, token ids (5,12,7), random:64, or an array (.npy)."


class Asked(NamedTuple):
    """A model, and how a text becomes its ids."""

    model: nn.Module | Callable[..., Any]
    tokenizer: Any
    config: Any  # of Hugging Face, or a spec of ours, or None


def look(
    model: Annotated[str, typer.Argument(help=targets.FORMS)],
    given: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT)],
    target: Annotated[str | None, typer.Option(help="What the decoder is given, in the same forms.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a page (.html) or a picture there.")] = None,
    effects: Annotated[bool, typer.Option(help="Remove each head in turn and say what changes.")] = False,
    seed: Annotated[int, typer.Option(help="For weights and inputs that are drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """See what each attention head of a model looks at, while it runs the kernels it always runs.

    Example: regard look ./my-checkpoint "The cat sat on the mat" --out heads.html

    regard look hf:config.json random:64 --json
    """
    torch.manual_seed(seed)
    asked = load(model)
    ids = read_input(given, asked)
    after = None if target is None else read_input(target, asked)
    view = see(asked.model, arguments(asked, ids, after), namer(asked.tokenizer))
    if effects:
        view.remove_heads()
    for sentence in view.missed:
        typer.echo(f"not seen: {sentence}", err=True)
    if out is not None:
        typer.echo(f"written: {view.save(out)}", err=True)
    if as_json or out is None:
        typer.echo(json.dumps(view.to_plain()) if as_json else str(Table(view.rows())))
    _say(view)


def _say(view: View) -> None:
    if sys.stderr.isatty():
        typer.echo(repr(view), err=True)


def load(source: str) -> Asked:
    """The model that `source` names, ready to run; weights that nobody trained are announced."""
    found = targets.read(source)
    folder = Path(source.removeprefix("hf:"))
    if isinstance(found, spec.Spec):
        typer.echo(f"{source} is a declaration: its weights are drawn, not trained", err=True)
        return Asked(found.build().eval(), None, found)
    if hasattr(found, "model_type"):
        return _huggingface(found, folder if folder.is_dir() else folder.parent)
    if isinstance(found, nn.Module):
        return Asked(found.eval(), _own_tokenizer(folder), getattr(found, "spec", None))
    if not callable(found):
        raise SpecError(
            f"{source} is a {type(found).__name__}; a model, or a function that makes one, is needed"
        )
    made = found()
    if not isinstance(made, nn.Module):
        raise SpecError(f"{source}() gave a {type(made).__name__}; it should give a model (an nn.Module)")
    return Asked(made.eval(), None, getattr(made, "config", getattr(made, "spec", None)))


def _huggingface(config: Any, folder: Path) -> Asked:
    from transformers import AutoModel, AutoTokenizer

    if any((folder / name).is_file() for name in WEIGHTS):
        model = AutoModel.from_pretrained(str(folder), local_files_only=True)
    else:
        typer.echo(f"{folder} holds no weights: they are drawn, not trained", err=True)
        model = AutoModel.from_config(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError):
        tokenizer = None
    return Asked(model.eval(), tokenizer, config)


def _own_tokenizer(folder: Path) -> Any:
    """The tokens of a run, or the tokenizer.json beside a checkpoint of ours, if there is one."""
    if (folder / TOKENS).is_file():
        return Tokens.from_json((folder / TOKENS).read_text(encoding="utf-8"))
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as e:
        raise SpecError(f"{path} needs the tokenizers library: pip install tokenizers") from e
    return Tokenizer.from_file(str(path))


def namer(tokenizer: Any) -> Any:
    """What turns ids into names: a Hugging Face tokenizer itself, a function for the others."""
    if isinstance(tokenizer, Tokens):
        return tokenizer.words
    if tokenizer is None or hasattr(tokenizer, "convert_ids_to_tokens"):
        return tokenizer
    return lambda ids: [tokenizer.id_to_token(i) for i in ids]


def read_input(given: str, asked: Asked) -> Tensor:
    """Ids (1, n), or an image or array (1, …)."""
    path = Path(given)
    if given.startswith("random:"):
        return _random(given, asked)
    if given and all(part.strip().isdigit() for part in given.split(",")):
        return torch.tensor([[int(part) for part in given.split(",")]])
    if path.suffix.lower() in IMAGES:
        return _image(path, asked)
    if path.suffix.lower() == ".npy":
        return _array(path)
    if len(given) < 1024 and path.is_file():
        given = targets._text(path)
    if asked.tokenizer is None:
        raise SpecError(
            f"there is no tokenizer beside this model, so {given[:40]!r} is no input; give ids, as in 5,12,7"
        )
    return torch.tensor([encoded(given, asked.tokenizer)])


def encoded(text: str, tokenizer: Any) -> list[int]:
    """The ids of a text, by any of the three kinds of tokenizers."""
    if isinstance(tokenizer, Tokens):
        return tokenizer.encode([text])[0]
    ids = tokenizer.encode(text)
    return ids if isinstance(ids, list) else ids.ids


def _random(given: str, asked: Asked) -> Tensor:
    if not (count := given.removeprefix("random:")).isdigit() or int(count) < 1:
        raise FormatError(f"{given!r}: write random:64 for 64 random tokens")
    if size := image_size(asked.config):
        return torch.rand(1, *size)
    return torch.randint(0, vocabulary(asked), (1, int(count)))


def vocabulary(asked: Asked) -> int:
    """How many tokens the model knows."""
    declared = getattr(asked.config, "encoder", asked.config)
    known = getattr(asked.config, "vocab_size", getattr(getattr(declared, "embedding", None), "vocab", None))
    if known is None and isinstance(asked.model, nn.Module):
        tables = [m for m in asked.model.modules() if isinstance(m, nn.Embedding)]
        known = max((t.num_embeddings for t in tables), default=None)
    if known is None:
        raise SpecError("this model has no table of tokens, so random ids mean nothing; give an array (.npy)")
    return int(known)


def image_size(config: Any) -> tuple[int, int, int] | None:
    """(channels, height, width) of a model of images."""
    if isinstance(config, spec.Vision):
        return config.channels, *config.image
    size = getattr(config, "image_size", None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(config, "num_channels", 3), height, width


def _image(path: Path, asked: Asked) -> Tensor:
    try:
        from PIL import Image
    except ModuleNotFoundError as e:
        raise SpecError(f"{path} is an image; pip install 'regard[figures]'") from e
    size = image_size(asked.config)
    if size is None:
        raise SpecError(f"{path} is an image, and this model does not say what image size it takes")
    try:
        image = Image.open(path).convert("L" if size[0] == 1 else "RGB").resize((size[2], size[1]))
    except OSError as e:
        raise FormatError(f"{path} cannot be read as an image: {e}") from e
    pixels = torch.tensor(list(image.tobytes()), dtype=torch.float32).reshape(size[1], size[2], -1)
    return ((pixels.permute(2, 0, 1) / 255 - 0.5) / 0.5)[None]


def _array(path: Path) -> Tensor:
    import numpy

    try:
        return torch.from_numpy(numpy.load(path, allow_pickle=False))
    except (OSError, ValueError) as e:
        raise FormatError(f"{path} cannot be read as an array: {e}") from e


def arguments(asked: Asked, ids: Tensor, after: Tensor | None) -> Any:
    """What the model is called with."""
    if not hasattr(asked.config, "model_type"):
        twofold = isinstance(asked.model, stack.EncoderDecoder)
        return (ids, ids if after is None else after) if twofold or after is not None else ids
    if ids.is_floating_point():
        return {"pixel_values": ids}
    named = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(asked.config, "is_encoder_decoder", False):
        named["decoder_input_ids"] = ids if after is None else after
    return named
