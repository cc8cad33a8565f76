"""A target from a module without an adapter: input, masks, cache and positions from its signature and by probing."""

import copy
import itertools
import re
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import SpecError
from ...pattern import WORDS, Pattern, neighborhood
from ..target import OPTIONS, Function, Model, Target
from .from_images import images_from_signature
from .from_signature import Hints, function_from_signature
from .mask_encoding import MaskEncoding, as_integers
from .module_cache import read_cache, tensor_of
from .module_masks import read_masks
from .module_windows import KEYS_BY_POSITION, read_module_window
from .names import (
    CACHES,
    CONTEXT,
    CONTEXT_PADDING,
    HEAD_COUNTS,
    KEYS,
    LENGTH_LIMITS,
    PADDING,
    QUERIES,
    START,
    TOKENS,
    TRAINING,
    VALUES,
    WIDTHS,
    mixes_otherwise,
    parameters_of,
    recognized,
    says_no_gradient,
    says_sequence_first,
    size_of,
    source_of,
    text_of,
)

MAX_FIXED_LENGTH = 400  # positions of a module that accepts only one length
KEYS_AND_VALUES = [{k, v} for k in KEYS for v in VALUES]  # in either order
POSITION_WORDS = re.compile(
    r"(?<![a-z])pos(?![a-z])|position|pos_?emb|(?<![a-z])rope|rotary|alibi|inv_freq|freqs|relative|sinus|slopes",
    re.I,
)
NO_POSITIONS = re.compile(  # words that deny them, or that are about tokens at some places
    r"\b(no|without|not|never|lacks)\s+(any\s+|use\s+|add\s+)?(positions?|positional|rotary|rope|alibi|relative)\b"
    r"|\b(real|valid|padded|padding|masked|unmasked|other|earlier|later|past|future)\s+positions?\b",
    re.I,
)
PROBED_LENGTH = 12  # positions, among which a mask of blocks or of a window hides some
PATTERN_CODE = re.compile(rf"\b(rg|regard)\.({'|'.join(word.__name__ for word in (*WORDS, neighborhood))})\(")
CAUSAL_CODE = re.compile(r"is_causal\s*=\s*True|\btr(il|iu)\b")


class ModuleReader:
    """One module while its arguments are being determined."""

    def __init__(self, module: nn.Module, hints: Hints):
        self.module, self.hints = module, hints
        self.parameters = parameters_of(module.forward) or {}
        self.text = text_of(module)
        self.names = {
            w: n
            for w, n in recognized(self.parameters).items()
            if w in ("mask", "causal", "lengths", "documents")
        }
        order = list(self.parameters)
        self.three = len(order) >= 3 and {order[1].lower(), order[2].lower()} in KEYS_AND_VALUES
        self.context = "key" if self.three else next((n for n in CONTEXT if n in self.parameters), None)
        self.padding = next((n for n in PADDING if n in self.parameters), None)
        self.cache = next((n for n in CACHES if n in self.parameters), None)
        self.start = next((n for n in START if n in self.parameters), None)
        self.encodings: dict[str, MaskEncoding] = {}
        given = size_of(module, ("batch_first",), bool)  # a docstring that explains it names both orders
        self.sequence_first = says_sequence_first(self.text) if given is None else not given
        self.notes: list[str] = []
        self.context_mask: str | None = None  # a parameter `mask` that is about the context
        self.context_width: int | None = None  # None: as wide as the input
        self.length: int | None = None  # the only number of positions that it accepts
        self.tokens, self.vocab, self.width = self._input(order[0] if order else "")

    def _input(self, first: str) -> tuple[bool, int | None, int | None]:
        """Whether the input is token ids, the vocabulary, and the width of vectors."""
        table = next((m for m in self.module.modules() if isinstance(m, nn.Embedding)), None)
        width = size_of(self.module, WIDTHS)
        if width is None:
            linear = next((m for m in self.module.modules() if isinstance(m, nn.Linear)), None)
            width = None if linear is None else linear.in_features
        if width is None:
            width = next((p.shape[0] for p in self.module.parameters() if p.dim() in (2, 3)), None)
        tokens = first in TOKENS or (table is not None and not self._runs_on_vectors(width))
        if not first or (tokens and table is None) or (not tokens and width is None):
            raise SpecError(
                f"{type(self.module).__name__}: cannot determine the input of forward({', '.join(self.parameters)}); "
                "write an adapter: regard.laws.Model(name, module, call, d_model=… or vocab=…), docs/check.md; "
                "or specify what it is: --as layer-norm, rms-norm, batch-norm, feed-forward or attention"
            )
        if not tokens and width is not None:
            width = self._checked_width(width)
        return tokens, table.num_embeddings if tokens and table is not None else None, width

    def _runs_on_vectors(self, width: int | None) -> bool:
        return width is not None and self._runs(torch.zeros(1, 2, width))

    def _checked_width(self, width: int) -> int:
        """The width for which a call succeeds: attributes first, then the sizes of linear maps."""
        sizes = [width, *(m.in_features for m in self.module.modules() if isinstance(m, nn.Linear))]
        sizes += [s for p in self.module.parameters() if p.dim() >= 2 for s in p.shape]
        sizes += [m.normalized_shape[0] for m in self.module.modules() if isinstance(m, nn.LayerNorm)]
        for each in dict.fromkeys(sizes):
            if self._runs(torch.randn(2, 3, each)):
                return each
        if self.required_context:  # a context of another width than the input
            for each, other in itertools.permutations(dict.fromkeys(sizes), 2):
                if self._runs(torch.randn(2, 3, each), torch.randn(2, 4, other)):
                    self.context_width = other
                    return each
        tables = (*self.module.parameters(), *self.module.buffers())
        lengths = {s for x in tables for s in x.shape if 1 < s <= MAX_FIXED_LENGTH}
        for each, n in itertools.product(dict.fromkeys(sizes), sorted(lengths)):
            if self._runs(torch.randn(2, n, each)):
                self.length = n
                self.notes.append(f"it accepts only sequences of {n} positions")
                return each
        return width

    def _runs(self, x: Tensor, other: Tensor | None = None) -> bool:
        other = x if other is None and self.required_context else other
        try:
            with torch.no_grad():
                self.call(copy.deepcopy(self.module).eval(), x, *(() if other is None else (other,)))
        except Exception:  # foreign code: it does not take this input
            return False
        return True

    @property
    def rows(self) -> int:
        """A batch size other than the number of heads, so that a mask cannot broadcast over the wrong axis."""
        return 3 if size_of(self.module, HEAD_COUNTS) != 3 else 4

    def keys_and_values(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """In the order of the parameters."""
        return (keys, values) if list(self.parameters)[1].lower() in KEYS else (values, keys)

    @property
    def required_context(self) -> bool:
        if self.three or self.context is None:
            return False
        p = self.parameters[self.context]
        return p.default is p.empty

    def call(self, module: nn.Module, x: Tensor, other: Tensor | None = None, **options: Any) -> Any:
        """forward with the laws' options under its own names."""
        arguments, values = self.arguments(x, other, options), options.get("values")
        if self.sequence_first:
            x = x.transpose(0, 1)
            other, values = (t if t is None else t.transpose(0, 1) for t in (other, values))
        if self.three:
            source = x if other is None else other
            out = module(x, *self.keys_and_values(source, source if values is None else values), **arguments)
        else:
            if other is not None:
                arguments[str(self.context)] = other
            out = module(x, **arguments)
        return batch_first(out) if self.sequence_first else out

    def arguments(self, x: Tensor, other: Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
        b, n = x.shape[:2]
        dtype = x.dtype if x.is_floating_point() else next(self.module.parameters()).dtype
        size = (b, size_of(self.module, HEAD_COUNTS) or 1, n, n if other is None else other.shape[1])
        given: dict[str, Any] = {}
        for option in ("causal", "documents"):
            if OPTIONS[option][0] in options and option in self.names:
                given[self.names[option]] = options[OPTIONS[option][0]]
        if options.get("allowed") is not None:
            allowed = options["allowed"]
            allowed = allowed[:, None] if allowed.dim() == 3 else allowed
            given[self.names["mask"]] = as_integers(
                self.encodings["mask"].encode(allowed, size, dtype), options
            )
        if options.get("bias") is not None:
            given[self.names["mask"]] = self.encodings["mask"].added(options["bias"], None, size)
        lengths, left = options.get("lengths"), options.get("left_padding")
        if lengths is not None and "lengths" in self.names and left is None:
            given[self.names["lengths"]] = lengths
        elif lengths is not None or left is not None:
            j = torch.arange(n, device=x.device)
            kept = torch.ones(b, n, dtype=torch.bool, device=x.device)
            kept = kept if lengths is None else kept & (j < lengths[:, None])
            kept = kept if left is None else kept & (j >= left[:, None])
            name = self.padding or self.names["mask"]
            encoding = self.encodings["padding"]
            if name in given:  # one parameter for both: the pairs that both allow
                kept = options["allowed"] & kept[:, None]
                given[name] = self.encodings["mask"].encode(kept[:, None], size, dtype)
            else:
                given[name] = encoding.encode(kept[:, None, None], size, dtype)
            given[name] = as_integers(given[name], options)
        if options.get("context_lengths") is not None:
            j = torch.arange(size[3], device=x.device)
            kept = (j < options["context_lengths"][:, None])[:, None, None]
            name = self.context_mask or next(n for n in CONTEXT_PADDING if n in self.parameters)
            given[name] = self.encodings["context"].encode(kept, size, dtype)
        return given | self._defaults(given, x)

    def _defaults(self, given: dict[str, Any], x: Tensor) -> dict[str, Any]:
        more: dict[str, Any] = {}
        for i, (name, p) in enumerate(self.parameters.items()):
            if i == 0 or name in given or (self.three and i < 3) or name == self.context:
                continue
            required = p.default is p.empty
            if name in TRAINING:
                more[name] = False
            elif name in START and required:
                more[name] = 0
            elif name in ("positions", "position_ids", "pos") and required:
                more[name] = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
            elif name == self.names.get("causal") and p.default is not False:
                more[name] = False
            elif required:
                more[name] = None
        return more

    # Probing the module

    def output(self, x: Tensor, other: Tensor | None = None, **options: Any) -> Tensor:
        module = copy.deepcopy(self.module).eval()
        with torch.no_grad():
            return tensor_of(self.call(module, x, other, **options))

    def sample(self, b: int, n: int, seed: int = 0) -> Tensor:
        g, n = torch.Generator().manual_seed(seed), self.length or n
        if self.tokens:
            assert self.vocab is not None
            return torch.randint(0, self.vocab, (b, n), generator=g)
        assert self.width is not None
        dtype = next((p.dtype for p in self.module.parameters()), torch.float32)
        return torch.randn(b, n, self.width, generator=g).to(dtype)

    def context_sample(self, b: int, m: int, seed: int = 5) -> Tensor:
        x = self.sample(b, m, seed)
        if self.context_width is None:
            return x
        g = torch.Generator().manual_seed(seed)
        return torch.randn(b, m, self.context_width, generator=g).to(x.dtype)

    def needed_context(self, b: int, m: int) -> Tensor | None:
        return self.context_sample(b, m) if self.required_context else None

    def effect(self, n: int = 5, **options: Any) -> Tensor:
        """[b, i, j]: whether output i of a batch row depends on input j of the same row."""
        b, n = self.rows, self.length or n
        x, y = self.sample(b, n), self.sample(b, n, seed=9)
        other = self.needed_context(b, n)
        before = self.output(x, other, **options)
        if before.dim() != 3 or before.shape[:2] != x.shape[:2]:
            raise ValueError(f"returned shape {tuple(before.shape)}")
        columns = []
        for j in range(n):
            changed = x.clone()
            changed[:, j] = y[:, j] if not self.tokens else (x[:, j] + 1) % (self.vocab or 2)
            after = self.output(changed, other, **options)
            columns.append(((after - before).abs().amax(-1) > 1e-6) | after.isnan().any(-1))
        return torch.stack(columns, -1)


def batch_first(out: Any) -> Any:
    """The output of a module with axes (n, b, d), or the first of its outputs, with axes (b, n, d)."""
    if isinstance(out, tuple):
        return (batch_first(out[0]), *out[1:])
    return out.transpose(0, 1) if isinstance(out, Tensor) and out.dim() > 2 else out


def module_from_signature(module: nn.Module, hints: Hints | None = None) -> Target:
    """A module of x, or of query, key and value, as a target; its options follow from the parameters of `forward`."""
    hints = hints or Hints()
    parameters = parameters_of(module.forward) or {}
    order = [name.lower() for name in parameters]
    split = len(order) >= 3 and order[0] in QUERIES and {order[1], order[2]} in KEYS_AND_VALUES
    if split and not any(p.requires_grad for p in module.parameters()):
        return _parameter_free(module, hints)
    if (vision := images_from_signature(module, hints)) is not None:
        return vision
    reader = ModuleReader(module, hints)
    claims = read_masks(reader)
    claims |= _read_order(reader)
    if reader.context:
        claims |= {"context"} | ({"separate values"} if reader.three else set())
    lacks = {"grad"} if says_no_gradient(reader.text) else set()
    if reader.sequence_first:
        reader.notes.append("axes (n, b, d), according to its docstring or batch_first")
    window, sinks = read_module_window(reader)
    if window is not None:
        claims |= {"positions"} if window[1] else {"always causal"}
    lacks |= _without(claims, reader)
    make_cache, decode = read_cache(reader)
    if make_cache is not None:
        claims |= {"cache"}
        if "causal" not in claims:
            claims |= {"always causal"}
    pooled = _is_pooled(reader)
    if pooled:
        claims |= {"pooled"}
    return Model(
        type(module).__name__,
        module,
        lambda module, x, other=None, **options: tensor_of(reader.call(module, x, other, **options)),
        architecture=_architecture(reader, claims),
        d_model=reader.width,
        d_context=reader.context_width,
        vocab=reader.vocab,
        heads=size_of(module, HEAD_COUNTS),
        max_length=reader.length or min(size_of(module, LENGTH_LIMITS) or 4096, 4096),
        length=reader.length,
        window=window,
        sinks=sinks,
        layers=None if window is None else 1,
        claims=claims,
        lacks=lacks,
        make_cache=make_cache,
        decode=decode,
        notes=tuple(reader.notes),
        device=hints.device or "cpu",
    )


def _parameter_free(module: nn.Module, hints: Hints) -> Function:
    """attention(q, k, v) written as a module without parameters: a function."""
    module = copy.deepcopy(module).eval()
    target = function_from_signature(module.forward, hints)
    object.__setattr__(target, "name", type(module).__name__)
    return target


def _is_pooled(reader: ModuleReader) -> bool:
    try:
        out = reader.output(
            reader.sample(3, 5), reader.context_sample(3, 4) if reader.required_context else None
        )
    except Exception:
        return False
    return out.dim() == 2 and out.shape[0] == 3


def _architecture(reader: ModuleReader, claims: set[str]) -> str:
    if reader.tokens:
        return "decoder" if "always causal" in claims else "encoder"
    return "decoder" if reader.required_context else "attention"


def _read_order(reader: ModuleReader) -> set[str]:
    """Whether it is always causal and whether it has positions, from its name, docstring, code and attributes.

    It is also causal if its outputs depend on earlier inputs only: the mask may be made outside the class.
    """
    claims: set[str] = set()
    module = reader.module
    words = f"{type(module).__name__}\n{reader.text}".lower()
    denies = re.search(r"(not|non|no|without|never)[- ]?(causal|autoregressive)|bidirectional", words)
    says = re.search(r"causal|autoregressive", words) and not denies and "prefix" not in words
    flag = size_of(module, ("causal", "is_causal"), bool)
    if "causal" not in reader.names and flag is not False:
        in_code = CAUSAL_CODE.search(source_of(module)) is not None
        if says or flag or _has_causal_buffer(module):
            claims |= {"always causal"}
        elif (in_code or not denies) and _looks_back_only(reader):
            claims |= {"always causal"}
            why = (
                "its code has a causal mask, and" if in_code else "each output depends on all earlier inputs;"
            )
            reader.notes.append(f"always causal: {why} no output depends on a later input")
    if _has_positions(reader):
        claims |= {"positions"}
    return claims


def _looks_back_only(reader: ModuleReader) -> bool:
    """Whether each output depends on its own input and on all earlier ones, and on no later one."""
    try:
        effect = reader.effect()
    except Exception:  # foreign code; the laws report what raises
        return False
    return bool((effect == torch.ones_like(effect).tril()).all())


def _has_causal_buffer(module: nn.Module) -> bool:
    """A square triangular table among the buffers: nanoGPT's `bias`, a registered mask."""
    for buffer in module.buffers():
        if buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2] > 1:
            table = buffer.reshape(-1, *buffer.shape[-2:])[0]
            table = table if table.dtype == torch.bool else table.isneginf() | (table == 1)
            past = torch.ones_like(table).tril()
            if any(torch.equal(table, t) for t in (past, ~past)):
                return True
    return False


def _has_positions(reader: ModuleReader) -> bool:
    """Whether the names of its parts or its code mention positions; without positions, order must not matter."""
    optional = [x for name, x in vars(reader.module).items() if POSITION_WORDS.search(name)]
    if optional and not any(x is not None and x is not False and x != "" for x in optional):
        return False  # its positions are an option that is off: timm's pos_embed = None
    module = reader.module
    named = [n for n, _ in (*module.named_modules(), *module.named_buffers(), *module.named_parameters())]
    if any(POSITION_WORDS.search(name) for name in named):
        return True
    code = NO_POSITIONS.sub("", re.sub(r"#.*", "", source_of(module)))  # a comment is not a statement
    if not POSITION_WORDS.search(code):
        return False
    options = parameters_of(type(module).__init__) or {}
    off = [p for name, p in options.items() if POSITION_WORDS.search(name) and not p.default]
    return not (off and _ignores_order(reader))  # an option that was not chosen, and is not stored


def _ignores_order(reader: ModuleReader) -> bool:
    """Whether permuted inputs give the permuted outputs."""
    order = torch.tensor([3, 0, 4, 1, 2])
    try:
        x, other = reader.sample(2, 5), reader.needed_context(2, 4)
        got, want = reader.output(x[:, order], other), reader.output(x, other)[:, order]
    except Exception:  # foreign code, or one of another length; the laws report what raises
        return False
    return got.shape == want.shape and torch.allclose(got, want, rtol=1e-4, atol=1e-5)


def _without(claims: set[str], reader: ModuleReader) -> set[str]:
    """Without positions, order must not matter; nothing is said of a module in which it does for another reason."""
    if "positions" in claims or reader.tokens or mixes_otherwise(reader.module):
        return set()
    return set() if _has_keys_by_position(reader) else {"positions"}


def _has_keys_by_position(reader: ModuleReader) -> bool:
    """Whether a module speaks of a window, blocks, global tokens and the like, or has a pattern of regard, and some
    output misses some input."""
    if not re.search(KEYS_BY_POSITION, reader.text, re.I) and not _has_pattern(reader.module):
        return False
    try:
        return not bool(reader.effect(PROBED_LENGTH).all())
    except Exception:  # foreign code; the laws report what raises
        return False


def _has_pattern(module: nn.Module) -> bool:
    """Whether a module holds a pattern of regard, or makes one in its code."""
    held = any(isinstance(x, Pattern) for m in module.modules() for x in vars(m).values())
    return held or any(re.search(PATTERN_CODE, source_of(m)) for m in module.modules())
