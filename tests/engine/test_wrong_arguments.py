"""Arguments of `attention` that cannot be meant: an error of regard with words, whatever they are.

The run with the type checker refuses them before they arrive, so these tests belong to the run without it.
"""

import re

import numpy as np
import pytest
import torch

import regard as rg
from regard import compat
from regard.errors import BackendError, ShapeError

pytestmark = pytest.mark.compiled
X = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.numpy(), X, X), r"^q is of type ndarray, not a tensor; use torch\.as_tensor\(q\)$"),
        ((X, X.numpy(), X), r"^k is of type ndarray"),
        ((X, X, X.tolist()), r"^v is of type list"),
        ((X, None, X), r"^k is None, not a tensor"),
        ((X.long(),) * 3, r"torch\.int64; attention needs floating-point numbers"),
        ((X.bool(),) * 3, r"torch\.bool; attention needs"),
        ((X.to(torch.complex64),) * 3, r"torch\.complex64; attention needs"),
        ((X.to(torch.float8_e4m3fn),) * 3, r"float8_e4m3fn; at least 16 bits are needed: x\.bfloat16\(\)"),
        ((X.to_sparse(), X, X), r"^q is a sparse tensor; give a dense one: a padded batch with lengths="),
        ((X, X.double(), X), r"^q is torch\.float32, k torch\.float64"),
    ],
)
def test_queries_keys_and_values_that_do_not_fit_are_refused_in_words(arguments, message):
    with pytest.raises(rg.ShapeError, match=message):
        rg.attention(*arguments)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("place", [0, 2])
def test_nested_tensors_are_refused_in_words(layout, place):
    arguments = [X, X, X]
    arguments[place] = torch.nested.nested_tensor([X[0, 0], X[0, 0]], layout=layout)
    with pytest.raises(rg.ShapeError, match=rf"^{'qkv'[place]} is a nested tensor; give a dense one"):
        rg.attention(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [3, 4]}, r"^lengths is of type list, not a tensor; use torch\.as_tensor\(lengths\)$"),
        ({"lengths": np.array([3, 4])}, r"^lengths is of type ndarray"),
        ({"lengths": 3}, r"^lengths is of type int"),
        ({"lengths": torch.tensor([3.0, 4.0])}, r"^lengths is torch\.float32; whole numbers are needed"),
        ({"lengths": torch.tensor([True, False])}, r"^lengths is torch\.bool; whole numbers"),
        ({"lengths": torch.tensor([3, 4, 5])}, r"^lengths has shape \(3,\)"),
        ({"lengths": torch.tensor([3, -1])}, r"^lengths has -1, and there are 5 keys: 0 to 5 is needed$"),
        ({"lengths": torch.tensor([6, 6])}, r"^lengths has 6, and there are 5 keys: 0 to 5 is needed$"),
        ({"lengths": torch.tensor([[0, 5], [-2, 5]])}, r"^lengths has -2, and there are 5 keys"),
        ({"bias": np.zeros((5, 5))}, r"^bias is of type ndarray"),
        ({"bias": [[0.0] * 5] * 5}, r"^bias is of type list"),
        ({"sink_logits": [0.0, 1.0]}, r"^sink_logits is of type list"),
        (
            {"sink_logits": torch.zeros(2, dtype=torch.complex64)},
            r"^sink_logits is torch\.complex64; scores are real",
        ),
        ({"bias": torch.zeros(5, 5, dtype=torch.complex64)}, r"^bias is torch\.complex64; scores are real"),
    ],
)
def test_options_that_are_no_tensors_are_refused_in_words(options, message):
    with pytest.raises(rg.ShapeError, match=message):
        rg.attention(X, X, X, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": rg.alibi()}, r"^bias=alibi\(\) is neither a tensor nor rg\.ByDistance"),
        (
            {"at": [0, 1]},
            r"^at=\[0, 1\]: use a whole number, \(start, step\), or a tensor with one per batch row$",
        ),
        ({"at": (1, 2, 3)}, r"^at=\(1, 2, 3\): use a whole number"),
        ({"at": "x"}, r"^at='x': use a whole number"),
        ({"at": (0.5, 1)}, r"^at=\(0\.5, 1\): use a whole number"),
        ({"at": (0, 1.5)}, r"^at=\(0, 1\.5\): use a whole number"),
        ({"at": ("x", 1)}, r"^at=\('x', 1\): use a whole number"),
        ({"dropout_p": "x"}, r"^dropout_p='x' is not a number in \[0, 1\)$"),
    ],
)
def test_biases_offsets_and_dropout_of_another_kind_are_refused_in_words(options, message):
    with pytest.raises(rg.SpecError, match=message):
        rg.attention(X, X, X, rg.causal(), **options)


@pytest.mark.parametrize("cap", ["3", True, torch.tensor(3.0)], ids=str)
def test_a_softcap_is_a_number(cap):
    with pytest.raises(rg.SpecError, match=r"is not a number; use None for scores without a cap$"):
        rg.attention(X, X, X, softcap=cap)


class WithoutMemory(torch.Tensor):
    """A bias to which nothing can be added: there is no memory for the sum."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.add):
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 720000000000 bytes"
            )
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_table_that_does_not_fit_the_memory_says_what_it_needs():
    def fn(i, j):
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 720000000000 bytes"
        )

    with pytest.raises(rg.BackendError) as error:
        rg.attention(X, X, X, rg.where(fn))
    assert str(error.value) == (
        "where(fn) over 5 queries and 5 keys needs a table of 0.0 GiB, and several times as much while it is made: "
        "more than there is. Declare it by words (rg.window, rg.every, …), or compute fewer queries at a time (at=)"
    )

    with pytest.raises(
        rg.BackendError, match=r"^causal\(\) over 5 queries and 5 keys needs a table of 0\.0 GiB"
    ):
        rg.attention(X, X, X, rg.causal(), bias=WithoutMemory(torch.zeros(5, 5)), softcap=2.0)

    def broken(i, j):
        raise RuntimeError("another reason")

    with pytest.raises(RuntimeError, match="another reason"):
        rg.attention(X, X, X, rg.where(broken))


def test_a_query_offset_is_a_whole_number():
    with pytest.raises(rg.SpecError, match=r"^at=1\.5: a query offset is a whole number$"):
        rg.attention(X, X, X, rg.causal(), at=1.5)


@pytest.mark.parametrize("at", [0, 2, -1, 3])
@pytest.mark.parametrize("backend", ["auto", "tiles", "reference"])
def test_a_query_offset_may_be_an_integer_of_numpy(at, backend):
    q, pattern = X[:, :, :3], rg.causal() & rg.window(2)
    expected = rg.attention(q, X, X, pattern, at=at, backend=backend)
    for given in (np.int64(at), np.int32(at), (np.int64(at), 1)):
        assert torch.equal(rg.attention(q, X, X, pattern, at=given, backend=backend), expected)
        assert rg.explain(q, X, X, pattern, at=given).backend == rg.explain(q, X, X, pattern, at=at).backend


@pytest.mark.parametrize("scale", ["0.5", [0.5], {}, torch.tensor([0.5, 0.5]), True], ids=str)
def test_a_scale_is_a_number(scale):
    rg.attention(X, X, X, scale=1)  # True is not read as the 1 of a call before
    with pytest.raises(rg.SpecError) as error:
        rg.attention(X, X, X, scale=scale)
    assert str(error.value) == f"scale={scale!r}: the factor of q·k is a number, or None for 1/√d_k"


@pytest.mark.parametrize("mask", [torch.zeros, lambda *shape: torch.ones(shape, dtype=torch.bool)])
def test_masks_of_more_or_fewer_axes_broadcast_or_are_refused_in_words(mask):
    def run(x, *shape):
        given = mask(*shape)
        return (
            rg.attention(x, x, x, given) if given.dtype == torch.bool else rg.attention(x, x, x, bias=given)
        )

    five = X.expand(3, 2, 2, 5, 4)
    torch.testing.assert_close(run(X[0], 1, 2, 5, 5), rg.attention(X[0], X[0], X[0]))
    torch.testing.assert_close(run(five, 2, 1, 5, 5), rg.attention(five, five, five))
    for x, shape in (
        (X[0], (3, 2, 5, 5)),
        (five, (4, 1, 2, 5, 5)),
        (five, (3, 1, 5, 5)),
        (X, (1, 1, 2, 2, 5, 5)),
    ):
        with pytest.raises(
            rg.ShapeError, match=r"has shape \(.*\), which does not broadcast to \(batch, heads"
        ):
            run(x, *shape)


def test_no_keys_no_queries_and_no_rows_are_fine():
    assert rg.attention(X, X[:, :, :0], X[:, :, :0]).abs().sum() == 0
    assert rg.attention(X[:, :, :0], X, X).shape == (2, 2, 0, 4)
    assert rg.attention(X[:0], X[:0], X[:0]).shape == (0, 2, 5, 4)
    assert rg.attention(X, X, X[..., :0]).shape == (2, 2, 5, 0)
    none = X[:, :0].clone().requires_grad_()  # no heads
    o, lse = rg.attention(none, none, none, rg.causal(), return_lse=True)
    assert o.shape == (2, 0, 5, 4) and lse.shape == (2, 0, 5)
    rg.attention(none, none, none).sum().backward()
    assert none.grad.shape == none.shape
    with pytest.raises(rg.ShapeError, match="0 key/value heads do not divide 2 query heads"):
        rg.attention(X, none, none)


def test_a_program_may_call_regard_in_place_of_sdpa(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", rg.attention)
    compat.can_read_flash_node.cache_clear()
    x = X[:, :, :3].clone().requires_grad_()  # a shape of its own, so that nothing is cached
    assert torch.nn.functional.scaled_dot_product_attention(x, x, x).grad_fn is not None
    assert compat.sdpa is not rg.attention


def test_a_padding_mask_as_lengths_says_how_it_becomes_lengths():
    q, mask = torch.zeros(2, 1, 4, 8), torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(
        rg.ShapeError, match=r"^lengths is torch\.bool; whole numbers are needed: mask\.sum\(-1\)"
    ):
        rg.attention(q, q, q, lengths=mask)


IDS, TABLE = torch.arange(8) // 3, torch.ones(8, 8, dtype=torch.bool).tril()
ELSEWHERE = {
    "documents": ({"pattern": rg.documents(IDS)}, "the data of documents(<8 ids>) are on cpu"),
    "composed": ({"pattern": rg.causal() & ~rg.documents(IDS)}, "the data of documents(<8 ids>) are on cpu"),
    "per head": ({"pattern": [rg.causal(), rg.documents(IDS)]}, "the data of documents(<8 ids>) are on cpu"),
    "lengths": ({"pattern": rg.lengths(IDS[:1])}, "the data of lengths(<1 lengths>) are on cpu"),
    "tree": ({"pattern": rg.tree(torch.arange(8) - 1)}, "the data of tree(<8 parents>) are on cpu"),
    "selected": (
        {"pattern": rg.selected(torch.zeros(4, 1, dtype=torch.long), size=2)},
        "the data of selected(<4×1 indices>, size=2) are on cpu",
    ),
    "table": ({"pattern": TABLE}, "pattern is on cpu"),
    "bias": ({"bias": torch.zeros(8, 8)}, "bias is on cpu"),
    "sinks": ({"sink_logits": torch.zeros(2)}, "sink_logits is on cpu"),
    "distances": ({"bias": rg.ByDistance(table=torch.zeros(2, 5))}, "table is on cpu"),
    "slopes": ({"bias": rg.ByDistance(slopes=torch.zeros(2))}, "slopes is on cpu"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference", "tiles"])
def test_tensors_on_another_device_are_refused_in_words(name, backend):
    options, message = ELSEWHERE[name]
    q = torch.empty(1, 2, 8, 4, device="meta")
    with pytest.raises(ShapeError, match=re.escape(f"{message}, and q on meta; ")) as e:
        rg.attention(q, q, q, backend=backend, **options)
    assert str(e.value).endswith(".to('meta')")


@pytest.mark.parametrize("name", ["lengths", "at"])
def test_lengths_and_offsets_may_be_on_the_cpu(name):
    """Meta tensors stand for those of a GPU."""
    q, row = torch.empty(1, 2, 8, 4, device="meta"), torch.tensor([3])
    for backend in ("auto", "reference"):
        assert rg.attention(q, q, q, rg.causal(), backend=backend, **{name: row}).device == q.device
    x = torch.randn(1, 2, 8, 4)
    with pytest.raises(
        ShapeError, match=re.escape(f"{name} is on meta, and q on cpu; move it: {name}.to('cpu')")
    ):
        rg.attention(x, x, x, rg.causal(), **{name: row.to("meta")})


@pytest.mark.parametrize("fn", [lambda i, j: TABLE.to("meta")[i, j], lambda i, j: i >= IDS.to("meta")])
def test_a_function_that_reads_a_tensor_on_another_device_is_refused_in_words(fn):
    q = torch.randn(1, 2, 8, 4)
    message = "i and j are on cpu, and the function reads a tensor on another device; move it there"
    with pytest.raises(ShapeError, match=message):
        rg.attention(q, q, q, rg.where(fn))


def test_a_sequence_that_is_divided_among_processes_is_refused(monkeypatch):
    q = torch.randn(1, 2, 8, 4)
    rg.attention(q, q, q, rg.causal())  # prepared: a repeated call must notice it, too

    def replaced(*given, **more):
        raise AssertionError

    replaced.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", replaced)
    with pytest.raises(BackendError) as refused:
        rg.attention(q, q, q, rg.causal())
    assert str(refused.value) == (
        "inside torch's context_parallel each process has a part of the sequence, and rg.attention would attend to "
        "the keys of that part only; use F.scaled_dot_product_attention there, or leave the sequence whole"
    )
    replaced.__module__ = "another_library"  # which does not divide sequences
    assert rg.attention(q, q, q, rg.causal()).shape == q.shape


def test_sharded_tensors_name_what_runs_a_pattern_on_them():
    class Sharded(torch.Tensor):
        device_mesh = "mesh"

    q = torch.randn(1, 2, 8, 4).as_subclass(Sharded)
    assert rg.attention(q, q, q).shape == q.shape  # PyTorch's own attention has rules for them
    for pattern in (rg.causal(), torch.ones(8, 8).tril().bool()):
        with pytest.raises(ShapeError) as refused:
            rg.attention(q, q, q, pattern)
        assert str(refused.value) == (
            "q, k or v is a DTensor, which has no rules for this pattern; where processes have whole sequences (of "
            "some heads or batch rows), use torch.distributed.tensor.experimental.local_map around rg.attention, or "
            "x.to_local()"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lengths": torch.ones(2, dtype=torch.complex64)},
            r"^lengths is torch\.complex64; whole numbers are",
        ),
        (
            {"sink_logits": torch.ones(2, dtype=torch.bool)},
            r"^sink_logits is torch\.bool; one number per query head",
        ),
        ({"backend": ["tiles"]}, r"^unknown backend \['tiles'\]; did you mean tiles\?$"),
        ({"backend": None}, r"^unknown backend None; known: auto, "),
        ({"at": 2**70}, r"^at=1180591620717411303424 is beyond ±2⁴⁰, and positions are computed in 64 bits"),
        ({"at": -(2**41)}, r"^at=-2199023255552 is beyond ±2⁴⁰"),
        ({"at": 2**40 + 1}, r"^at=1099511627777 is beyond ±2⁴⁰"),
        ({"at": (0, 2**60)}, r"^at=\(0, 1152921504606846976\) is beyond ±2⁴⁰"),
        ({"at": torch.tensor([2**60, 2**60])}, r"^at=1152921504606846976 is beyond ±2⁴⁰"),
        ({"at": torch.tensor([0, -(2**60)])}, r"^at=\[0, -1152921504606846976\] is beyond ±2⁴⁰"),
    ],
)
def test_arguments_that_no_backend_can_read_are_refused_in_words(options, message):
    with pytest.raises(rg.RegardError, match=message):
        rg.attention(X, X, X, rg.causal() | rg.every(3), **options)


@pytest.mark.parametrize("at", [2**40, -(2**40), (5, 2**40)])
def test_offsets_up_to_the_limit_are_exact(at):
    pattern = rg.every(3) | rg.strided(2)
    results = [rg.attention(X, X, X, pattern, at=at, backend=name) for name in ("reference", "tiles")]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda i, j: None, r"it returned None, and a condition is needed, true or false$"),
        (
            lambda i, j: torch.ones(3, 3) > 0,
            r"it returned shape \(3, 3\), which does not broadcast to that of its ",
        ),
    ],
)
def test_a_function_that_returns_no_condition_of_its_pairs_is_refused_in_words(fn, message):
    for pattern in (rg.where(fn), rg.causal() & rg.where(fn)):
        with pytest.raises(rg.RegardError, match=message):
            rg.attention(X, X, X, pattern)
