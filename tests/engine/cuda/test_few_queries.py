"""Launches without a plan, as they are prepared: which calls run by the launches of another. No GPU is needed."""

from importlib.util import find_spec

import pytest
import torch

from regard.engine.attention import MAX_QUERIES, _cache_key, _keep, _without_keys
from regard.engine.backends import PREPARED
from regard.engine.call import Cache, Options
from regard.pattern import causal, every, window

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
PATTERN = causal() & (window(70) | every(8))


def heads(m, n=3, b=2, h=4, h_kv=2, d=16, rows=499, device="cpu"):
    """q, k and v, where keys and values are a part of buffers with so many rows."""
    made = {"dtype": torch.float16, "device": device}
    of_keys = b, h_kv, rows, d
    q, k, v = torch.zeros(b, h, n, d, **made), torch.zeros(of_keys, **made), torch.zeros(of_keys, **made)
    return q, k[:, :, :m], v[:, :, :m]


def prepared(q, k, v):
    """The layout of a call, and its first launch."""
    from regard.engine.cuda import few_queries
    from regard.engine.cuda.call import PLAIN, call_layout, task

    made = task(q, v, Options(PATTERN, k.shape[2] - q.shape[2], 1, 0.25))
    call = call_layout(made, (q, k, v), PLAIN)
    return call, few_queries.forward(call).launches[0][0]


def numbers(before, after):
    """Of a call with the tensors `after`, by the launch of one with the tensors `before`."""
    from regard.engine.cuda import few_queries

    call, launch = prepared(*before)
    return few_queries.numbers_for(launch, call, *after[1:])


@needs_triton
@pytest.mark.parametrize("n", [1, 3, 16])
@pytest.mark.parametrize("m, later", [(283, 284), (283, 353), (353, 283), (283, 283), (100, 125), (125, 100)])
@pytest.mark.parametrize("rows", [(499, 499), (499, 521), (None, None)])
def test_a_launch_for_more_keys_has_the_numbers_of_its_own_but_for_the_pieces(n, m, later, rows):
    before, after = (heads(x, n=n, rows=y or x) for x, y in zip((m, later), rows))
    call, launch = prepared(*before)
    own_call, own = prepared(*after)
    found = numbers(before, after)
    pieces = 15  # after the strides of q, k and v, two numbers of heads, n, m, start and step
    assert [
        (x, y) for at, (x, y) in enumerate(zip(found, own.numbers, strict=True)) if at != pieces and x != y
    ] == []
    assert found[pieces] == launch.numbers[pieces] and found[12:14] == (later, later - n)
    (sizes,), (own_sizes,) = launch.sizes.values(), own.sizes.values()
    given = {name for name in sizes._fields if str(getattr(sizes, name)) != str(getattr(own_sizes, name))}
    assert given <= {"SPLIT", "EARLY"} and call.task.pattern == own_call.task.pattern


REFUSED = {
    "more than a quarter more": lambda: heads(354),
    "more than a fifth fewer": lambda: heads(226),
    "keys and values differ": lambda: (*heads(284)[:2], heads(285)[2]),
    "rows of keys are not aligned": lambda: (heads(284)[0], heads(284, d=24)[1][..., :16], heads(284)[2]),
    "rows of values are not aligned": lambda: (*heads(284)[:2], heads(284, d=24)[2][..., :16]),
    "heads of keys are not aligned": lambda: (heads(284)[0], skewed(284), heads(284)[2]),
    "columns of keys are apart": lambda: (heads(284)[0], heads(284, d=32)[1][..., ::2], heads(284)[2]),
    "columns of values are apart": lambda: (*heads(284)[:2], heads(284, d=32)[2][..., ::2]),
    "one key for all": lambda: (heads(284)[0], heads(1)[1].expand(-1, -1, 284, -1), heads(284)[2]),
}


def skewed(m):
    """Keys whose heads begin at odd multiples of 8 numbers."""
    return torch.zeros(2 * 2 * (m * 16 + 8), dtype=torch.float16).as_strided(
        (2, 2, m, 16), (2 * (m * 16 + 8), m * 16 + 8, 16, 1)
    )


@needs_triton
@pytest.mark.parametrize("name", REFUSED)
def test_kernels_compiled_for_other_numbers_are_not_reused(name):
    assert numbers(heads(283), heads(284)) is not None
    assert numbers(heads(283), REFUSED[name]()) is None
    assert "aligned" not in name or numbers(REFUSED[name](), heads(284)) is None


@needs_triton
def test_a_launch_is_not_reused_for_fewer_keys_than_queries():
    """Queries would be at positions before the first key, for which a call needs `at`."""
    assert numbers(heads(17, n=16, h=2), heads(16, n=16, h=2)) is not None
    assert numbers(heads(17, n=16, h=2), heads(15, n=16, h=2)) is None


@needs_triton
def test_a_launch_with_offsets_of_32_bits_is_not_reused_where_64_are_needed():
    def of_rows(stride, of_batch=32):
        shape, strides = (2, 2, 284, 16), (of_batch, 16, stride, 1)
        q, _, v = heads(284, device="meta")
        return q, torch.empty_strided(shape, strides, dtype=torch.float16, device="meta"), v

    most = 2**31 // 284 // 16 * 16
    assert numbers(heads(284, device="meta"), of_rows(most)) is not None
    assert numbers(heads(284, device="meta"), of_rows(most + 16)) is None
    assert numbers(heads(284, device="meta"), of_rows(16, 2**31)) is None
    assert numbers(of_rows(most + 16), heads(284, device="meta")) is None


def key(q, k, v, pattern=PATTERN, factors=(None, None), backend="auto"):
    return _cache_key(q, k, v, pattern, factors, backend)


OTHERS = {
    "queries": (heads(283, n=4), {}),
    "batch": (heads(283, b=1), {}),
    "heads": (heads(283, h=2), {}),
    "key heads": (heads(283, h_kv=1), {}),
    "width": (heads(283, d=32), {}),
    "width of values": ((*heads(283)[:2], heads(283, d=32)[2]), {}),
    "dtype": (tuple(x.float() for x in heads(283)), {}),
    "dtype of keys": ((heads(283)[0], heads(283)[1].float(), heads(283)[2]), {}),
    "device": (heads(283, device="meta"), {}),
    "kind of values": ((*heads(283)[:2], torch.nn.Parameter(heads(283)[2], requires_grad=False)), {}),
    "pattern": (heads(283), {"pattern": causal()}),
    "scale": (heads(283), {"factors": (0.5, None)}),
    "softcap": (heads(283), {"factors": (None, 0.5)}),
    "backend": (heads(283), {"backend": "triton"}),
}


def test_calls_that_differ_in_the_number_of_keys_alone_share_a_key():
    first = _without_keys(key(*heads(283)))
    assert first is not None and first == _without_keys(key(*heads(284))) != key(*heads(283))
    for name, (tensors, options) in OTHERS.items():
        other = _without_keys(key(*tensors, **options))
        assert other is not None and other != first, name


def test_calls_with_gradients_data_or_many_queries_share_none():
    q, k, v = heads(283)
    assert _without_keys(key(q, k, v.requires_grad_())) is None
    assert _without_keys(key(*heads(283, n=MAX_QUERIES))) is not None
    assert _without_keys(key(*heads(283, n=MAX_QUERIES + 1))) is None
    assert _without_keys(key(*(x[0] for x in heads(283)))) is None
    of_data = ("state", 1), *key(*heads(283))[1:]
    assert _without_keys(of_data) is None


def test_a_prepared_call_is_kept_for_others_if_it_can_take_other_keys():
    class Direct:
        def with_other_keys(self):
            pass

    calls, shared = Cache(7), ("of any number of keys", object())
    without, plain = Direct(), lambda q, k, v: q
    _keep(calls, ("first", shared), plain)
    assert calls == {"first": plain} and shared not in PREPARED
    _keep(calls, ("second", None), without)
    assert calls["second"] is without and shared not in PREPARED
    _keep(calls, ("third", shared), without)
    assert PREPARED.pop(shared) == without.with_other_keys and calls["third"] is without


@needs_triton
def test_layers_with_as_many_keys_share_the_numbers_of_a_step(monkeypatch):
    from regard.engine.cuda import few_queries, host
    from regard.engine.cuda.call import PLAIN, call_layout, task

    class Program:
        launches, direct, received = [(None, None, None)], [object()], []

        def run(self, tensors, numbers):
            self.received.append(numbers)
            type(self).lse = tensors[4]

    computed = []

    def numbers_for(launch, call, k, v):
        computed.append((k.shape[2], k.stride()))
        return None if k.shape[2] == 285 else (k.shape[2], k.stride())

    monkeypatch.setattr(few_queries, "forward", lambda call: Program())
    monkeypatch.setattr(few_queries, "numbers_for", numbers_for)
    monkeypatch.setattr(host, "hooks_set", lambda: False)
    q, k, v = heads(283)
    attend = host.PreparedAttention(task(q, v, Options(PATTERN, 280, 1, 1.0)), False)
    assert attend.with_other_keys(q, k, v) is None  # nothing was prepared
    attend.few_queries = call_layout(attend.task, (q, k, v), PLAIN)
    for _ in range(3):
        assert attend.with_other_keys(q, k, v).shape == (2, 4, 3, 16)
    assert computed == [(283, k.stride())] and Program.received == 3 * [(283, k.stride())]
    attend.spare, attend.stream = torch.empty(2, 4, 3), 0
    attend.with_other_keys(q, k, v)
    assert Program.lse is attend.spare  # which nothing reads
    attend.stream = 1
    attend.with_other_keys(q, k, v)
    assert Program.lse is not attend.spare  # another stream may write to it
    assert Program.lse.shape == (2, 4, 3)
    attend.stream = 0
    with monkeypatch.context() as patched:
        patched.setattr(host, "_in_graph", lambda q: True)
        narrow = attend.with_other_keys(q.half(), k.half(), v[..., :8].half().contiguous())
    assert narrow.shape == (2, 4, 3, 8) and narrow.dtype == torch.float16
    assert Program.lse is not attend.spare and Program.lse.dtype == torch.float32  # a graph is replayed later
    computed.pop()
    wide = heads(283, rows=600)[1:]
    for keys in (heads(284)[1:], wide, (k, v), (k, wide[1])):  # other strides, of one of them too
        attend.with_other_keys(q, *keys)
    assert len(computed) == 5
    assert (
        attend.with_other_keys(q, *heads(285)[1:]) is None
        and attend.with_other_keys(q, *heads(285)[1:]) is None
    )
    assert len(computed) == 6
    attend.few_queries = call_layout(attend.task, (q, *heads(285)[1:]), PLAIN)  # prepared meanwhile
    attend.with_other_keys(q, *heads(285)[1:])
    assert len(computed) == 7
    flat = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert flat.stride() != q.stride() and attend.with_other_keys(flat, k, v) is None
    Program.direct = []  # not compiled yet
    assert attend.with_other_keys(q, k, v) is None
