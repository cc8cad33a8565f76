"""Initialization of weights, by name.

    name            a matrix d_in → d_out                                    embeddings: std
    xavier          uniform within ± √(6/(d_in + d_out)), each on its own    d_model^(−1/2)
    xavier_packed   query, key and value share the bound of one matrix       d_model^(−1/2)
                    d_in → d_q + d_k + d_v, as nn.MultiheadAttention does
    normal          normal, std 0.02                                         0.02
    depth_scaled    the same, but what a layer adds to the residual stream   0.02
                    is divided by √(2·layers), as in GPT-2
    torch           PyTorch's own initialization, unchanged                  1

Biases start at zero, norms at scale one and shift zero. The fans of a matrix are those of one product: the gates of
a recurrent cell and the parts of a packed query-key-value matrix are counted separately, except by `xavier_packed`.

The Xavier kinds initialize embeddings with std d_model^(−1/2) since the models that use them multiply embeddings by
√d_model: they then have unit variance, like the sinusoids added to them.
"""

from collections.abc import Iterator
from math import sqrt

import torch
from torch import Tensor, nn

from ..errors import SpecError, nearest
from .embedding import Embedding, LanguageHead, MaskedHead

NAMES = ("xavier", "xavier_packed", "normal", "depth_scaled", "torch")
_STD = 0.02
# Projections that add to the residual stream, each with a neighbor that identifies it (a classifier's w_out has no
# w_in): regard's, then those of nn.MultiheadAttention and nn.TransformerEncoderLayer.
_RESIDUAL = {"w_o": "w_v", "w_out": "w_in", "out_proj": "in_proj_weight", "linear2": "linear1"}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *_BATCH_NORMS, *_INSTANCE_NORMS)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_HEADS = (LanguageHead, MaskedHead)
_GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}


def xavier_bound(fan_in: int, fan_out: int) -> float:
    """√(6/(fan_in + fan_out)): a weight uniform within ± this bound has variance 2/(fan_in + fan_out).

    >>> round(xavier_bound(512, 512), 7), round(xavier_bound(512, 3 * 512), 7)
    (0.0765466, 0.0541266)
    """
    return sqrt(6 / (fan_in + fan_out))


@torch.no_grad()
def initialize(
    module: nn.Module, name: str, layers: int | None = None, generator: torch.Generator | None = None
) -> nn.Module:
    """Initialize every weight of the module in place, by a kind's name; returns the module.

    Queries, keys and values are the linears `w_q`, `w_k`, `w_v` of one module; `w_o` beside them, and `w_out`
    beside `w_in`, add to the residual stream. Without `layers`, the number is read from the `spec` of the stack.
    A parameter that is neither a matrix, an embedding, a norm nor a bias (a table of positions, say) is not changed.
    """
    if name not in NAMES:
        raise SpecError(f"initialization {name!r} is unknown; {nearest(name, NAMES)}")
    if name == "torch":
        return module
    outputs = _packed_outputs(module) if name == "xavier_packed" else {}
    stds = _residual_stds(module, layers) if name == "depth_scaled" else {}
    embeddings = {table for part in module.modules() for table in _embeddings(part)}
    for path, part in module.named_modules():
        for weight, fan_in, fan_out in _matrices(part, packed=name == "xavier_packed"):
            if weight in embeddings:  # a head tied to its embedding is initialized with it
                continue
            if name in ("normal", "depth_scaled"):
                weight.normal_(std=stds.get(path, _STD), generator=generator)
            else:
                bound = xavier_bound(fan_in, outputs.get(part, fan_out))
                weight.uniform_(-bound, bound, generator=generator)
        for table in _embeddings(part):
            std = table.shape[-1] ** -0.5 if name.startswith("xavier") else _STD
            table.normal_(std=std, generator=generator)
            if getattr(part, "padding_idx", None) is not None:
                table[part.padding_idx].zero_()
        _reset_norm_and_bias(part)
    return module


def _embeddings(part: nn.Module) -> list[Tensor]:
    if isinstance(part, nn.Embedding):
        return [part.weight]
    return [t for t in (part.table, part.types) if t is not None] if isinstance(part, Embedding) else []


def _matrices(part: nn.Module, packed: bool) -> Iterator[tuple[Tensor, int, int]]:
    """The matrices of this module itself, each with its fan_in and fan_out."""
    match part:
        case nn.Linear():
            yield part.weight, part.in_features, part.out_features
        case LanguageHead(table=nn.Parameter() as table):
            yield table, table.shape[1], table.shape[0]
        case _ if isinstance(part, _CONVOLUTIONS):
            taps = part.weight[0, 0].numel()
            yield part.weight, part.weight.shape[1] * taps, part.weight.shape[0] // part.groups * taps
        case nn.RNNBase():
            for name, weight in part.named_parameters(recurse=False):
                if name.startswith("weight"):
                    gates = 1 if name.startswith("weight_hr") else _GATES[part.mode]
                    yield from ((gate, gate.shape[1], gate.shape[0]) for gate in weight.chunk(gates))
        case nn.MultiheadAttention():
            packed_weight = part.in_proj_weight
            if packed_weight is None:
                parts = [part.q_proj_weight, part.k_proj_weight, part.v_proj_weight]
            else:
                parts = [packed_weight] if packed else list(packed_weight.chunk(3))
            yield from ((w, w.shape[1], w.shape[0]) for w in parts)


def _packed_outputs(module: nn.Module) -> dict[nn.Module, int]:
    """For each query, key and value projection the summed outputs of all three, where they share one input."""
    outputs: dict[nn.Module, int] = {}
    for part in module.modules():
        three = [getattr(part, name, None) for name in ("w_q", "w_k", "w_v")]
        linears = [w for w in three if isinstance(w, nn.Linear)]
        if len(linears) == 3 and len({w.in_features for w in linears}) == 1:
            outputs |= dict.fromkeys(linears, sum(w.out_features for w in linears))
    return outputs


def _residual_stds(module: nn.Module, layers: int | None) -> dict[str, float]:
    """0.02/√(2·layers) for each path of a projection that adds to the residual stream."""
    stds = {}
    for path, _ in module.named_modules():
        around, _, name = path.rpartition(".")
        if name not in _RESIDUAL or not hasattr(module.get_submodule(around), _RESIDUAL[name]):
            continue
        depth = _layers_around(module, path) if layers is None else layers
        if depth is None or depth < 1:
            raise SpecError(
                f"depth_scaled divides {path} by √(2·layers), but layers is {depth}; give layers=, at least 1"
            )
        stds[path] = _STD / sqrt(2 * depth)
    return stds


def _layers_around(module: nn.Module, path: str) -> int | None:
    """spec.layers of the nearest module around `path` that declares it."""
    while True:
        layers = getattr(getattr(module.get_submodule(path), "spec", None), "layers", None)
        if layers is not None or not path:
            return layers
        path = path.rpartition(".")[0]


def _reset_norm_and_bias(part: nn.Module) -> None:
    if isinstance(part, _NORMS) and part.weight is not None:
        part.weight.fill_(1.0)
    if isinstance(part, (*_NORMS, *_HEADS, nn.Linear, *_CONVOLUTIONS, nn.RNNBase, nn.MultiheadAttention)):
        for name, parameter in part.named_parameters(recurse=False):
            # bias_k and bias_v of nn.MultiheadAttention are a key and a value, not biases
            if name in ("bias", "in_proj_bias") or name.startswith(("bias_ih", "bias_hh")):
                parameter.zero_()
