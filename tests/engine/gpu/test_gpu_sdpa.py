"""PyTorch's attention in inference on a GPU, by kernels that build no plan for a new shape, against the formula.

PYTHONPATH=src:tests/helpers python3 -m pytest tests/engine/gpu/test_gpu_sdpa.py -q
"""

import pytest
import torch

import regard as rg
from regard.engine import sdpa
from regard.engine.attention import call_of, normalized

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def formula(q, k, v, options):
    """Every table dense, in the dtype of the inputs."""
    call = normalized(call_of(q, k, v, **options)).hide()
    k, v = (rg.reference.repeat_heads(x, q.shape[1]) for x in (call.k, call.v))
    return rg.reference.attend(call.q, k, v, call.allowed(), bias=call.dense_bias(), scale=call.scale).o


def check(q, k, v, options, where):
    """max|fast − ref| ≤ 2 · max|plain − ref| + 4 ulp of max|ref|, each time."""
    ref = formula(*(x.double() for x in (q, k, v)), options)
    plain = (formula(q, k, v, options).double() - ref).abs().max()
    limit = 2 * plain + 4 * torch.finfo(q.dtype).eps * ref.abs().max()
    results = [rg.attention(q, k, v, **options, backend="sdpa") for _ in range(3)]
    for o in results:
        error = (o.double() - ref).abs().max()
        assert error <= limit, f"{where}: {error:.2e} where {limit:.2e} is allowed"
        assert torch.equal(o, results[0]), f"{where}: other bits"


def qkv(b, h, h_kv, n, m, d, dtype, layout="heads first"):
    generator = torch.Generator("cuda").manual_seed(n + m)
    made = [
        torch.randn(b, x, heads, d, device="cuda", generator=generator).to(dtype).transpose(1, 2)
        for heads, x in ((h, n), (h_kv, m), (h_kv, m))
    ]
    if layout == "heads first":
        return [x.contiguous() for x in made]
    if layout == "unaligned":
        return [torch.cat([x[..., :1], x], -1)[..., 1:] for x in made]
    return made  # heads behind positions


@pytest.fixture(autouse=True)
def without_gradients_and_pytorchs_choice(monkeypatch):
    def never(*given, **options):
        raise AssertionError("PyTorch would choose cuDNN here")

    if torch.cuda.get_device_capability() in ((9, 0), (10, 0)):
        monkeypatch.setattr(sdpa, "_sdpa", never)
    rg.engine.backends.PREPARED.clear()
    with torch.no_grad():
        yield
    rg.engine.backends.PREPARED.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["heads first", "heads behind positions", "unaligned"])
def test_dense_calls(dtype, layout):
    for b, h, h_kv, n, m, d in ((2, 4, 4, 61, 61, 64), (1, 8, 2, 300, 300, 128), (3, 4, 1, 1, 77, 64),
                                (2, 4, 2, 19, 333, 80), (1, 2, 2, 128, 128, 256), (2, 3, 3, 5, 5, 8)):  # fmt: skip
        for pattern in (None, rg.causal()) if n in (1, m) else (None,):
            tensors = qkv(b, h, h_kv, n, m, d, dtype, layout)
            check(*tensors, {"pattern": pattern}, f"{pattern!r}, {(b, h, h_kv, n, m, d)}, {layout}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n, m", [(61, 61), (1, 300), (7, 128), (100, 237)])
def test_masked_calls(dtype, n, m):
    generator = torch.Generator("cuda").manual_seed(m)
    bias = torch.randn(2, 4, n, m, device="cuda", generator=generator).to(dtype)
    table = torch.rand(2, 1, n, m, device="cuda", generator=generator) < 0.5
    table[..., 0] = True
    options = {
        "a bias": {"bias": bias},
        "a bias for all rows": {"bias": bias[:1, :, :1]},
        "a bias with −inf": {"bias": bias.masked_fill(bias > 0.5, -torch.inf)},
        "a table": {"pattern": table},
        "lengths": {"lengths": torch.tensor([m, 1], device="cuda")},
        "a window": {"pattern": rg.window(5)},
        "a bias by distance": {
            "bias": rg.ByDistance(slopes=torch.rand(4, device="cuda", generator=generator))
        },
        "queries without a key": {"pattern": rg.causal() & rg.every(3), "at": -3},
    }
    for h_kv, layout in ((4, "heads first"), (2, "heads behind positions")):
        for name, given in options.items():
            tensors = qkv(2, 4, h_kv, n, m, 64, dtype, layout)
            check(*tensors, given, f"{name}, {n} queries, {m} keys, {layout}")


def test_a_captured_graph_replays():
    q, k, v = qkv(2, 4, 2, 61, 61, 64, torch.bfloat16)
    for options in ({"pattern": rg.causal()}, {"pattern": rg.window(5)}):
        expected = rg.attention(q, k, v, **options, backend="sdpa")
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            rg.attention(q, k, v, **options, backend="sdpa")
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = rg.attention(q, k, v, **options, backend="sdpa")
        o.zero_()
        graph.replay()
        assert torch.equal(o, expected)
