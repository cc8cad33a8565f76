"""The backward pass of short calls by one launch: its lists visit every allowed pair once, from either side; and
prepared calls under autograd."""

import gc
import importlib.util
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from regard import reference
from regard.pattern import causal, dilated, every, full, rows, sinks, strided, window

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

PATTERNS = [
    full(),
    causal(),
    causal() & (window(9) | every(16)),
    window(3) | rows(13, 5),
    window(5) | strided(8),
    dilated(5, 7),
    window(9) - window(4),
    sinks(0),
]
TILE, BLOCK = 16, 8


def made(pattern, n, m, by_keys, place=(0, 1)):
    from regard.engine.cuda.tile_lists import tile_lists
    from regard.pattern.parts import row_steps

    allowed = pattern.allowed(n, m, place).numpy()
    allowed = np.ascontiguousarray(allowed.T) if by_keys else allowed
    return allowed, tile_lists(allowed, row_steps(pattern, place[1], by_keys), TILE, BLOCK)


def visited(allowed, found):
    """How often each pair is added up: those of a block before the first masked one without a mask."""
    seen = np.zeros(allowed.shape, dtype=int)
    for (_, _, _, first, masked, end, _, _), members in zip(found.items, found.members, strict=True):
        members = members[members >= 0]
        for t in range(first, end):
            others = found.blocks[t][found.blocks[t] >= 0]
            where = np.ix_(members, others)
            seen[where] += allowed[where] if t >= masked else 1
            assert t >= masked or len(others) == BLOCK
    return seen


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize(("n", "m"), [(97, 97), (1, 53), (53, 1), (48, 32)])
@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_every_allowed_pair_is_visited_once_and_every_member_is_written_once(pattern, n, m, by_keys):
    allowed, found = made(pattern, n, m, by_keys)
    assert (visited(allowed, found) == allowed).all()
    assert sorted(found.members[found.members >= 0]) == list(range(len(allowed)))


@given(st.data(), st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(1, 9), max_size=3))
def test_every_allowed_pair_of_any_table_is_visited_once_whatever_the_steps(data, n, m, hops):
    from regard.engine.cuda.tile_lists import tile_lists

    bits = data.draw(st.integers(0, 2 ** (n * m) - 1))
    allowed = np.array([bits >> x & 1 for x in range(n * m)], dtype=bool).reshape(n, m)
    assert (visited(allowed, tile_lists(allowed, [1, *hops], TILE, BLOCK)) == allowed).all()


def blocks_of(pattern, n, by_keys):
    _, found = made(pattern, n, n, by_keys)
    return int((found.items[:, 5] - found.items[:, 3]).sum())


@pytest.mark.parametrize(
    ("pattern", "by_keys", "max_blocks"),
    [
        (dilated(5, 7), False, 32),  # 8 tiles of a residue or two, 4 blocks each; 88 of neighbors
        (causal() & strided(8), True, 16),  # a tile of each residue: its 16 keys, 2 blocks
        (causal() & every(16), True, 16),  # one tile of the 8 allowed keys, with every query
        (window(2) | rows(16), False, 40),  # 16 blocks for the rows without a limit, 3 for each of the other 8 tiles
    ],
    ids=repr,
)  # fmt: skip
def test_members_with_the_same_partners_share_a_tile(pattern, by_keys, max_blocks):
    n = 128
    assert blocks_of(pattern, n, by_keys) <= max_blocks < (n // TILE) * (n // BLOCK)


def test_the_longest_tile_comes_first():
    _, found = made(window(2) | rows(16), 128, 128, False)
    length = found.items[:, 5] - found.items[:, 3]
    assert length[0] == 16 and (np.diff(length) <= 0).all()


def test_a_block_allowed_for_all_members_needs_no_mask_though_the_tile_is_not_full():
    _, found = made(full(), 20, 19, False)
    assert found.items[:, 3:6].tolist() == [[0, 2, 3], [3, 5, 6]]


def layouts(n=128, m=128, d_k=64, d_v=64, h=2, h_kv=2):
    from regard.engine.cuda.call import contiguous as dense

    q, k, v = dense(1, h, n, d_k), dense(1, h_kv, m, d_k), dense(1, h_kv, m, d_v)
    return q, k, v, dense(1, h, n, d_v), dense(1, h, n, d_v)


def task(d_k=64, d_v=64, dtype=torch.bfloat16, **more):
    from regard.engine.cuda.call import Task, default

    given = {"dropout_p": 0.0, "softcap": None, "configs": default(d_k, d_v, dtype)} | more
    return Task(causal() & window(9), 0, 1, 0.1, **given)


def test_short_plain_calls_with_stored_configurations_take_one_launch():
    from regard.engine.cuda.call import MAX_PAIRS, CallLayout, one_launch_config
    from regard.engine.cuda.call import contiguous as dense

    def config_of(task, tensors, dtype):
        return one_launch_config(CallLayout(task, tensors, dtype, torch.device("cpu")))

    half = torch.bfloat16
    assert config_of(task(), layouts(), half) is not None
    assert config_of(task(128, 40), layouts(d_k=128, d_v=40), half) is not None
    assert config_of(task(dtype=torch.float32), layouts(), torch.float32) is not None
    side = int(MAX_PAIRS**0.5)
    assert config_of(task(), layouts(side, side), half) is not None
    assert config_of(task(), layouts(side, side + 1), half) is None
    assert config_of(task(256, 64), layouts(d_k=256), half) is None
    assert config_of(task(reach=3), layouts(), half) is None
    assert config_of(task(dropout_p=0.1), layouts(), half) is None
    several = replace(task().configs, one_launch=None)
    assert config_of(task(configs=several), layouts(), half) is None
    far = dense(1, 2, 128, 64)._replace(stride=(1 << 40, 1 << 33, 1 << 26, 1))
    assert config_of(task(), (far, *layouts()[1:]), half) is None


def test_one_launch_ends_where_the_gpu_no_longer_waits_for_the_cpu():
    """By the allowed pairs of all heads: a dense call has more of them than a sparse one of the same size."""
    from regard.engine.cuda import call

    dense, sparse, half, single = full(), causal() & window(9), torch.bfloat16, torch.float32

    def heads(pattern, width, dtype):
        """The largest number of heads of 128 queries and keys."""
        place = pattern, 128, 128, 0, 1
        return max(h for h in range(4096) if call.one_launch(place, h, width, dtype))

    pairs = 128 * 128
    assert heads(dense, 33, half) == heads(dense, 64, half) == call.MAX_ALLOWED_NARROW // pairs
    assert heads(dense, 65, half) == heads(dense, 128, torch.float16) == call.MAX_ALLOWED_WIDE // pairs
    assert heads(dense, 64, single) == heads(dense, 128, single) == call.MAX_ALLOWED_FLOAT32 // pairs
    assert heads(sparse, 128, single) == call.MAX_ALLOWED_FLOAT32 // sparse.count(128) == 849
    # One H200, forward and backward, ms in one launch and in three: 0.082 / 0.097, 0.45 / 0.18, 2.8 / 0.98.
    assert call.one_launch((sparse, 1024, 1024, 0, 1), 64, 64, half)
    assert not call.one_launch((causal(), 1024, 1024, 0, 1), 64, 128, half)
    assert not call.one_launch((causal(), 1024, 1024, 0, 1), 64, 64, single)
    # Queries at the end of the keys have more of them.
    at_the_end, at_the_begin = ((causal(), 64, 1024, at, 1) for at in (960, 0))
    assert not call.one_launch(at_the_end, 32, 64, single) and call.one_launch(at_the_begin, 32, 64, single)


def test_the_tables_are_made_once_for_a_pattern_and_a_shape():
    from regard.engine.cuda.tile_lists import one_launch_tables

    given = (causal() & window(9), 97, 101, 4, 1), (64, 64), torch.device("cpu")
    (items, members, blocks), for_keys = one_launch_tables(*given)
    assert one_launch_tables(*given)[0][0] is items
    assert (for_keys, len(items)) == (2, 4)
    assert {x.dtype for x in (items, members, blocks)} == {torch.int32}
    assert members.shape == (4, 64) and blocks.shape == (int(items[-1, 5]), 64)


PATTERN = causal() & window(2)


@pytest.fixture
def prepared(monkeypatch):
    """A prepared call with the formula in place of the kernels: what is left is autograd's."""
    from regard.engine.cuda import host

    def formula(q, k, v, *rest):
        found = reference.attend(q, k, v, PATTERN.allowed(q.shape[2]), scale=0.3)
        return found.o, torch.zeros(q.shape[:3])

    def gradients(tensors, *rest):
        q, k, v, _, do, _ = tensors
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            return torch.autograd.grad(formula(*inputs)[0], inputs, do)

    def from_saved(saved, grads, task, extras, bias_gradient):
        q, k, v, o, lse = saved
        return *gradients((q, k, v, o, grads[0], lse)), None, None, None

    monkeypatch.setattr(host, "forward", formula)
    monkeypatch.setattr(host, "prepared_forward", lambda call: formula)
    monkeypatch.setattr(host, "backward", from_saved)
    monkeypatch.setattr(host, "prepared_backward", lambda call: gradients)
    return host.PreparedAttention(replace(task(), pattern=PATTERN, scale=0.3), True)


def qkv(n=5, d=2):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, d, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)]


def test_a_prepared_call_has_gradients_and_double_backward(prepared):
    for _ in range(2):
        assert gradcheck(prepared, qkv()) and gradgradcheck(prepared, qkv())
    q, k, v = qkv()
    prepared(q.detach(), k, v.detach()).sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None


@pytest.mark.parametrize("gives_delta", [True, False])
def test_sink_logits_and_lengths_have_gradients_and_double_backward(monkeypatch, gives_delta):
    """With formulas in place of the kernels, the backward one by the saved lse: what is left is autograd's."""
    from regard.engine import reference_backend
    from regard.engine.call import Call, Extras
    from regard.engine.cuda import host
    from regard.engine.cuda.host import join_sink, sink_gradient

    def formula(q, k, v, extras):
        with torch.no_grad():
            call = Call(q, k, v, PATTERN, None, extras.lengths, scale=0.3, at=(0, 1))
            return join_sink(*reference_backend.attend(call), extras.sink)

    def gradients(tensors, dlse, extras):
        q, k, v, o, do, lse = tensors
        delta = (do * o).sum(-1) - (0.0 if dlse is None else dlse)
        keys = torch.arange(5)
        visible = (keys >= extras.lengths[:, :1]) & (keys < extras.lengths[:, 1:])
        allowed = PATTERN.allowed(5) & visible[:, None, None]
        weights = (0.3 * q @ k.mT - lse[..., None]).exp().masked_fill(~allowed, 0.0)
        ds = 0.3 * weights * (do @ v.mT - delta[..., None])
        given = [delta] if gives_delta else []
        dsink = None if extras.sink is None else sink_gradient(extras.sink, tensors[3:], dlse, *given)
        return ds @ k, ds.mT @ q, weights.mT @ do, None, None, dsink

    monkeypatch.setattr(
        host, "prepared_forward", lambda call: lambda q, k, v, extras, _=None: formula(q, k, v, extras)
    )
    monkeypatch.setattr(host, "prepared_backward", lambda call: gradients)
    limits, computed = torch.tensor([[1, 4]]), replace(task(), pattern=PATTERN, scale=0.3)
    sink = torch.tensor([0.4, -1.3], dtype=torch.float64, requires_grad=True)
    repeated = host.PreparedAttention(computed, True)

    def attend(q, k, v, sink):
        return host.attend(computed, q, k, v, Extras(lengths=limits, sink=sink))

    def attend_prepared(q, k, v, sink):
        return repeated(q, k, v, limits, None, sink)

    for one in (
        attend,
        attend_prepared,
    ):  # each is called many times, so mostly with launches that are cached
        assert gradcheck(one, (*qkv(), sink)) and gradgradcheck(one, (*qkv(), sink))
    o, _ = attend(*qkv(), sink)
    assert bool((o[:, :, 0] == 0.0).all())  # the first query has no key that is not padding
    inputs = qkv()
    for of_sink in (sink.detach(), sink):  # without and with a gradient of the sink, the others are the same
        found = torch.autograd.grad(attend_prepared(*inputs, of_sink).sum(), inputs)
        expected = torch.autograd.grad(attend(*inputs, sink)[0].sum(), inputs)
        assert all(map(torch.allclose, found, expected))
    q, k, v = (x.detach() for x in qkv())
    (alone,) = torch.autograd.grad(attend_prepared(q, k, v, sink).sum(), sink)
    assert torch.allclose(alone, torch.autograd.grad(attend(q, k, v, sink)[0].sum(), sink)[0])


def test_values_of_another_width_than_keys_are_read_without_a_copy_in_a_repeated_call():
    from regard.engine.cuda import host

    def readable(d_k, d_v, dtype=torch.bfloat16):
        q, k, v, o, do = (torch.empty(1, 2, 64, d, dtype=dtype) for d in (d_k, d_k, d_v, d_v, d_v))
        assert host._readable(q, k, v) == host._readable(q, k, v, o, do)
        return host._readable(q, k, v)

    assert readable(192, 128)  # as in DeepSeek's models
    assert readable(64, 128) and readable(16, 16) and readable(64, 24)
    assert not readable(64, 16)  # values narrower than 24 get zeros behind, unless keys are, too
    assert not readable(64, 100) and not readable(100, 64) and readable(100, 64, torch.float32)


def test_an_input_that_was_changed_in_between_is_an_error(prepared):
    for which in range(3):
        inputs = qkv()
        o = prepared(*inputs)
        with torch.no_grad():
            inputs[which].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


def test_what_is_saved_for_the_backward_pass_is_freed_with_its_output(prepared):
    inputs = qkv()
    prepared(*inputs)
    gc.disable()
    try:
        o = prepared(*inputs)
        node, at = weakref.ref(o.grad_fn), weakref.ref(o)
        del o
        assert node() is None and at() is None
    finally:
        gc.enable()
