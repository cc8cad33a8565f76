"""Numbers and sizes that a compiler or an export holds as symbols."""

import pytest
import torch
from torch.export import Dim, export
from torch.testing import assert_close

import regard as rg

pytestmark = pytest.mark.compiled

SPARSE = rg.causal() & rg.window(3)
IDS = torch.arange(16) // 5


@pytest.fixture(autouse=True)
def forget_what_was_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(b=3, n=20, seed=0):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(b, h, n, 8, generator=g) for h in (4, 2, 2))


NUMBERS = {  # after the first change a compiler holds a number as a symbol
    "an offset": (lambda a, **x: rg.attention(**x, pattern=SPARSE, at=a), (3, 5, 7, 12)),
    "an offset of documents": (
        lambda a, **x: rg.attention(**x, pattern=rg.causal() & rg.documents(IDS), at=a), (3, 5, 12),
    ),
    "a start and a step": (lambda a, **x: rg.attention(**x, pattern=SPARSE, at=(a, 1)), (3, 5, 7)),
    "a scale": (lambda a, **x: rg.attention(**x, pattern=SPARSE, scale=a), (0.3, 0.5, -1.0, 0.0)),
    "a softcap": (lambda a, **x: rg.attention(**x, pattern=SPARSE, softcap=a), (3.0, 5.0, 7.0)),
    "a window": (lambda a, **x: rg.attention(**x, pattern=rg.causal() & rg.window(a)), (3, 5, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_between_calls_of_a_compiled_function(name):
    run, numbers = NUMBERS[name]
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 16, 8), torch.randn(1, 2, 16, 8)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for number in numbers:
        assert_close(compiled(number, q=q, k=k, v=v), run(number, q=q, k=k, v=v))


def with_data(name, b, n):
    """The function of q, k, v and data, and the data."""
    g = torch.Generator().manual_seed(b + n)
    draw = lambda *shape: torch.randint(0, n, shape, generator=g)  # noqa: E731
    return {
        "a bool tensor": (lambda q, k, v, x: rg.attention(q, k, v, x), draw(b, 1, n, n) > n // 3),
        "a bool tensor and a softcap": (
            lambda q, k, v, x: rg.attention(q, k, v, x, softcap=2.0), draw(b, 1, n, n) > n // 3,
        ),
        "lengths": (lambda q, k, v, x: rg.attention(q, k, v, SPARSE, lengths=x), draw(b)),
        "left padding": (
            lambda q, k, v, x: rg.attention(q, k, v, rg.causal(), lengths=x), draw(b, 2).sort(-1).values,
        ),
        "documents": (
            lambda q, k, v, x: rg.attention(q, k, v, rg.causal() & rg.documents(x)), (draw(b, n) % 3).sort(-1).values,
        ),
        "a tree": (
            lambda q, k, v, x: rg.attention(q, k, v, rg.tree(x)),
            (torch.arange(n) - 1 - draw(b, n) % 2).clamp(min=-1),
        ),
        "selected blocks": (
            lambda q, k, v, x: rg.attention(q, k, v, rg.selected(x, 4)), draw(b, -(-n // 4), 2) // 4,
        ),
    }[name]  # fmt: skip


DATA = (
    "a bool tensor", "a bool tensor and a softcap", "lengths", "left padding", "documents", "a tree",
    "selected blocks",
)  # fmt: skip


class Function(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, q, k, v, x):
        return self.run(q, k, v, x)


class OfSomeRows(Function):
    def forward(self, q, k, v, x, keep):
        rows = keep.nonzero()[:, 0]  # as many as the data say: the batch is an unbacked size
        return self.run(q[rows], k[rows], v[rows], x[rows])


@pytest.mark.parametrize("name", DATA)
def test_a_dynamic_batch_and_length_stay_dynamic_with_data(name):
    run, x = with_data(name, 3, 20)
    axes = {
        "lengths": (0,),
        "left padding": (0,),
        "documents": (0, 1),
        "a tree": (0, 1),
        "selected blocks": (0, 1),
    }
    inputs = ((0, 2), (0, 2), (0, 2), axes.get(name, (0, 2, 3)))
    dynamic = tuple(dict.fromkeys(each, Dim.AUTO) for each in inputs)
    program = export(Function(run), (*qkv(), x), dynamic_shapes=dynamic).module()
    for b, n in ((5, 20), (2, 36)):
        inputs = (*qkv(b, n), with_data(name, b, n)[1])
        assert_close(program(*inputs), run(*inputs))


@pytest.mark.parametrize("name", [name for name in DATA if "softcap" not in name])
def test_a_batch_whose_size_data_decide_is_exported(name):
    run, x = with_data(name, 3, 20)
    inputs = (*qkv(), x)
    program = export(OfSomeRows(run), (*inputs, torch.tensor([True, True, True]))).module()
    for keep in ([True, True, False], [True, True, True]):
        some = torch.tensor(keep)
        assert_close(program(*inputs, some), run(*(each[some] for each in inputs)))
