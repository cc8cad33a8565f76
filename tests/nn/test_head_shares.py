"""Heads split between processes (tensor parallelism): the outputs of the shares sum to the output of the layer."""

import copy

import pytest
import torch

import regard as rg
from regard.errors import RegardError, ShapeError


def built(heads: int = 4, kv_heads: int = 2, **declared) -> torch.nn.Module:
    torch.manual_seed(0)
    return rg.Attention(heads * 8, heads=heads, kv_heads=kv_heads, **declared).build().double()


def share(module: torch.nn.Module, rank: int, of: int, names: str = "qkvo") -> torch.nn.Module:
    """What `parallelize_module` leaves to one process: rows of w_q, w_k and w_v, columns of w_o."""
    part = copy.deepcopy(module)
    for name in names:
        layer = getattr(part, f"w_{name}")
        weight = layer.weight.detach().chunk(of, 1 if name == "o" else 0)[rank]
        new = torch.nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
        with torch.no_grad():
            new.weight.copy_(weight)
            new.bias.copy_(layer.bias / of if name == "o" else layer.bias.chunk(of)[rank])
        setattr(part, f"w_{name}", new)
    return part


@pytest.mark.parametrize("position", [None, rg.rope(), rg.rope(fraction=0.5)])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2)])
def test_shares_of_the_heads_sum_to_the_layer(position, heads, kv_heads):
    module = built(heads, kv_heads, pattern=rg.causal() & rg.window(3), position=position)
    x = torch.randn(2, 7, heads * 8, dtype=torch.float64)
    total = sum(share(module, rank, 2)(x) for rank in range(2))
    torch.testing.assert_close(total, module(x))
    lengths = torch.tensor([7, 4])
    total = sum(share(module, rank, 2)(x, lengths=lengths) for rank in range(2))
    torch.testing.assert_close(total, module(x, lengths=lengths))


def test_one_key_head_is_kept_by_every_process():
    module = built(4, 1, position=rg.rope())
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    torch.testing.assert_close(sum(share(module, rank, 4, "qo")(x) for rank in range(4)), module(x))


def test_a_share_steps_through_its_own_cache():
    module = built(position=rg.rope(), pattern=rg.causal())
    x = torch.randn(1, 6, 32, dtype=torch.float64)
    parts, caches = [share(module, rank, 2) for rank in range(2)], [rg.KeyValues() for _ in range(2)]
    with torch.no_grad():
        steps = [sum(p(x[:, t : t + 1], cache=c) for p, c in zip(parts, caches)) for t in range(6)]
    torch.testing.assert_close(torch.cat(steps, 1), module(x).detach())


@pytest.mark.parametrize(
    "declared, named",
    [
        ({"position": rg.alibi()}, "alibi()"),
        ({"position": rg.t5_buckets()}, "t5_buckets()"),
        ({"sink_logits": True}, "sink_logits=True"),
        ({"extra_key": True}, "extra_key=True"),
        ({"score": "additive"}, "score='additive'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_term_for_all_heads_refuses_a_share(declared, named):
    part = share(built(4, 4, **declared), 1, 4)
    with pytest.raises(ShapeError) as error:
        part(torch.randn(1, 5, 32, dtype=torch.float64))
    assert f"w_q gives 1 of 4 heads and w_k 1 of 4, but {named} is for all 4 heads" in str(error.value)


def test_heads_are_not_cut_and_key_heads_stay_with_their_queries():
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    four = rg.per_head([rg.causal()] * 3 + [rg.window(2)])
    with pytest.raises(RegardError, match="4 patterns"):
        share(built(4, 4), 0, 2)(x, pattern=four)
    with pytest.raises(ShapeError, match="w_q gives 4 columns, which are not heads of 8"):
        share(built(4, 4), 0, 8)(x)
    with pytest.raises(
        ShapeError, match="w_q gives 2 of 4 heads and w_k 2 of 2: split both in the same proportion"
    ):
        share(built(4, 2), 1, 2, "qo")(x)
