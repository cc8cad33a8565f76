"""PyTorch's attention on CUDA in inference: which calls run by a kernel that builds no plan, and what it is given.

These kernels need a GPU (tests/engine/gpu/test_gpu_sdpa.py runs them); here PyTorch's formula stands in for them.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard as rg
from regard import compat
from regard.costs.trace.attention import Call, Gpu, kernel_of
from regard.engine import attention, sdpa
from regard.engine.backends import PREPARED, choose
from regard.engine.call import CallFacts, aligned_rows
from regard.engine.gpu_estimates import CUDNN_PLAN, LAYERS, REUSED, avoids_plan, sdpa_dense, sdpa_plan
from regard.reference import repeat_heads

BF16 = {"dtype": torch.bfloat16, "device": "cuda:0", "heads": 16, "kv_heads": 16, "d_k": 64, "d_v": 64}


def facts(pattern, n, m=None, **more):
    return CallFacts(pattern, n, n if m is None else m, **BF16 | more)


@pytest.fixture(autouse=True)
def nothing_known():
    PREPARED.clear()
    yield
    PREPARED.clear()


def test_short_calls_in_inference_avoid_a_plan_of_cudnn():
    for n in (1, 64, 1000):
        assert avoids_plan(facts(rg.full(), n, 1000))
    assert avoids_plan(facts(rg.causal(), 1000)) and not avoids_plan(facts(rg.causal(), 16384))
    assert 0 < sdpa_dense(facts(rg.full(), 100)) < CUDNN_PLAN / REUSED / 10
    # One query has a new number of keys at each step, so a plan serves the layers of one step.
    share = sdpa_dense(facts(rg.full(), 1, 4096, d_v=128)) - sdpa_dense(
        facts(rg.full(), 1, 4096, d_v=128, grad=True)
    )
    assert share == pytest.approx(CUDNN_PLAN / LAYERS)


def test_a_mask_avoids_a_plan_until_that_takes_longer():
    masked = {"bias": "tensor"}
    assert avoids_plan(facts(rg.causal(), 1000, **masked)) and not avoids_plan(
        facts(rg.causal(), 4096, **masked)
    )
    assert avoids_plan(facts(rg.full(), 1, 4096, **masked))
    assert not avoids_plan(facts(rg.full(), 1, 400_000, **masked))
    assert sdpa_plan(facts(rg.causal(), 4096, **masked)) == CUDNN_PLAN / REUSED
    assert 0 < sdpa_plan(facts(rg.causal(), 100, **masked)) < CUDNN_PLAN / REUSED


@pytest.mark.parametrize(
    "more",
    [
        {"grad": True},
        {"bias_grad": True},
        {"dropout_p": 0.1},
        {"dtype": torch.float32},
        {"m": 0},
        {"device": "cpu"},
        {"device": "mps:0"},
        {"d_k": 60, "d_v": 60},
        {"d_k": 512, "d_v": 512},
        {"batch": 1 << 16},
        {"heads": 1 << 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", ["none", "tensor"])
def test_what_cudnn_does_not_run_or_training_repeats_has_no_plan(more, bias):
    assert not avoids_plan(facts(rg.full(), 100, bias=bias, **more))
    assert sdpa_plan(facts(rg.full(), 100, bias=bias, **more)) == 0


def test_gpus_on_which_pytorch_prefers_other_kernels_have_no_plan(monkeypatch):
    call = facts(rg.full(), 100)
    assert avoids_plan(call)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, prefers in (
        ((9, 0), True),
        ((10, 3), True),
        ((8, 0), False),
        ((8, 9), False),
        ((12, 0), False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert avoids_plan(call) is prefers
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not avoids_plan(call)


def test_a_choice_inside_sdpa_kernel_holds_afterwards():
    with sdpa_kernel(SDPBackend.MATH):
        inside = choose(facts(rg.full(), 100), "sdpa")
    assert "FlashAttention-2" in inside.reason and choose(facts(rg.full(), 100), "sdpa") is inside


def test_the_reason_names_the_kernel():
    assert "FlashAttention-2" in choose(facts(rg.full(), 100), "sdpa").reason
    assert "FlashAttention-2" not in choose(facts(rg.full(), 100, grad=True), "sdpa").reason
    assert "FlashAttention-2" not in choose(facts(rg.causal(), 16384), "sdpa").reason
    masked = choose(facts(rg.full(), 100, bias="tensor"), "sdpa").reason
    assert masked.endswith("the memory-efficient kernel, as cuDNN would build a plan for each new shape")


class Kernels:
    """In place of the two kernels: PyTorch's formula, with what each was given."""

    def __init__(self, monkeypatch):
        self.calls = []
        names = {sdpa.FLASH: self.flash, sdpa.EFFICIENT: self.efficient}
        monkeypatch.setattr(sdpa, "_kernel", names.get)
        monkeypatch.setattr(sdpa, "_sdpa", None)  # whoever calls it fails

    def flash(self, q, k, v, dropout_p, is_causal, return_debug_mask, *, scale):
        assert (dropout_p, return_debug_mask) == (0.0, False)
        return self.attend("flash", q, k, v, None, is_causal, scale)

    def efficient(self, q, k, v, mask, compute_log_sumexp, dropout_p, is_causal, *, scale):
        assert (compute_log_sumexp, dropout_p) == (False, 0.0)
        assert q.shape[1] == k.shape[1] == v.shape[1], "it takes no grouped heads"
        assert mask.shape == (*q.shape[:3], k.shape[2]) and mask.dtype == q.dtype and mask.stride(-1) == 1
        assert not any(s % 16 for s in mask.stride()[:-1]) and not mask.data_ptr() & 31
        readable = mask.untyped_storage().nbytes() // mask.element_size() - mask.storage_offset()
        ends = sum(s * (size - 1) for s, size in zip(mask.stride()[:-1], mask.shape[:-1]))
        assert ends + mask.shape[-1] + -mask.shape[-1] % 16 <= readable, (
            "rows are read up to a multiple of 16"
        )
        return self.attend("efficient", q, k, v, mask, is_causal, scale)

    def attend(self, name, q, k, v, mask, is_causal, scale):
        for x in (q, k, v):
            assert (
                x.stride(-1) == 1 and not any(s % 8 for s in x.stride()[:-1]) and not x.storage_offset() % 8
            )
        self.calls.append(name)
        with sdpa_kernel(SDPBackend.MATH):
            k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
            return (F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale),)


def qkv(n, m, d=16, h_kv=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (3, 4, n, d), (3, h_kv, m, d), (3, h_kv, m, d)
    return [torch.randn(s, generator=generator).to(torch.float16) for s in shapes]


LAYOUTS = {
    "heads first": lambda x: x,
    "heads behind positions": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "rows that begin at odd numbers": lambda x: torch.cat([x[..., :3], x], -1)[..., 3:],
    "columns first": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, 8), (torch.float32, 4), (torch.float64, 2)])
def test_rows_are_copied_unless_they_begin_at_multiples_of_16_bytes(dtype, unit):
    """Neither sizes nor the other strides and the offset may hide the one that does not fit."""
    numbers, width = torch.arange(50_000, dtype=dtype), 6 * unit
    for place, wrong in product(range(5), (1, unit // 2, unit)):
        # The strides of four axes, and where the first row begins.
        steps = [48 * unit, 24 * unit, 12 * unit, 1, 4 * unit]
        steps[place] += wrong
        x = numbers.as_strided((2, 3, 5, width), steps[:4], steps[4])
        found = aligned_rows(x)
        assert (found is x) == (wrong == unit and place != 3), (place, wrong)
        assert torch.equal(found, x) and found.stride(3) == 1 and not found.storage_offset() % unit
        assert not any(step % unit for step in found.stride()[:3])
    for size, least, expected in ((width, 1, width), (width, 7 * unit, 7 * unit), (3, 1, max(unit, 4))):
        x = numbers[: 6 * size].view(1, 2, 3, size)
        found = aligned_rows(x, least)
        assert (
            found.shape[3] == expected and torch.equal(found[..., :size], x) and not found[..., size:].any()
        )


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_dense_call_gives_the_kernel_aligned_rows(monkeypatch, name, causal):
    kernels, (q, k, v) = Kernels(monkeypatch), qkv(7, 7)
    exact = rg.attention(
        *(x.double() for x in (q, k, v)), rg.causal() if causal else None, scale=0.3, backend="reference"
    )
    for changed in range(3):
        given = [LAYOUTS[name](x) if at == changed else x for at, x in enumerate((q, k, v))]
        o = sdpa._without_plan(*given, None, causal, 0.3)
        assert (o.double() - exact).abs().max() < 3e-3
    assert kernels.calls == ["flash"] * 3


@pytest.mark.parametrize("m", [5, 16, 23, 32])
def test_a_masked_call_gives_the_kernel_a_mask_that_it_can_read(monkeypatch, m):
    kernels, (q, k, v) = Kernels(monkeypatch), qkv(7, m)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(3, 4, 7, m, generator=generator).to(q.dtype)
    allowed = torch.rand(3, 1, 7, m, generator=generator) < 0.5
    allowed[..., 0] = True
    wide = torch.zeros(1, 1, 7, 48, dtype=q.dtype)[..., :m].copy_(bias[:1, :1])
    masks = {
        "contiguous": bias,
        "of all rows": bias[:1],
        "of two axes": bias[0, 0],
        "of all queries": bias[:, :, :1],
        "of all queries, heads and rows": bias[0, 0, 0].clone().expand(3, 4, 7, m),
        "of heads and rows, expanded": bias[:1, :1].expand(3, 4, 7, m),
        "bool": allowed,
        "bool of two axes": allowed[0, 0],
        "columns first": bias.mT.contiguous().mT,
        "every 16th number": torch.zeros(3, 4, 7, 16 * m, dtype=q.dtype)[..., ::16].copy_(bias),
        "rows 48 apart": wide,
        "one row of it": wide[:, :, :1],
        "rows 40 apart": torch.zeros(1, 1, 7, 40, dtype=q.dtype)[..., :m].copy_(bias[:1, :1]),
        "from the 9th number on": torch.zeros(1, 1, 7, 48, dtype=q.dtype)[..., 8 : 8 + m].copy_(bias[:1, :1]),
    }
    for name, mask in masks.items():
        exact = F.scaled_dot_product_attention(
            q.double(), *(repeat_heads(x.double(), 4) for x in (k, v)),
            mask if mask.dtype == torch.bool else mask.double(),
        )  # fmt: skip
        o = sdpa._without_plan(q, k, v, mask, False, 16**-0.5)
        assert (o.double() - exact).abs().max() < 4e-3, name
    assert kernels.calls == ["efficient"] * len(masks)
    if m == 16:  # no copy of a mask that can be read
        assert sdpa._with_aligned_rows(bias) is bias
    assert sdpa._with_aligned_rows(wide) is wide


def test_a_mask_at_the_end_of_its_memory_is_copied():
    mask = torch.zeros(21, dtype=torch.float16).as_strided((1, 1, 2, 5), (0, 0, 16, 1))
    assert sdpa._with_aligned_rows(mask) is not mask
    mask = torch.zeros(32, dtype=torch.float16).as_strided((1, 1, 2, 5), (0, 0, 16, 1))
    assert sdpa._with_aligned_rows(mask) is mask


def test_a_prepared_call_takes_the_kernel_for_its_size(monkeypatch):
    kernels, (q, k, v) = Kernels(monkeypatch), qkv(7, 7)
    mask = torch.full((7, 7), -torch.inf, dtype=q.dtype).triu(1)
    exact = rg.attention(*(x.double() for x in (q, k, v)), rg.causal(), scale=1.0, backend="reference")
    for given, is_causal in ((None, True), (mask, False)):
        o = sdpa._direct_function(facts(rg.causal(), 100, scale=1.0), given, is_causal)(q, k, v)
        assert (o.double() - exact).abs().max() < 4e-3
    assert kernels.calls == ["flash", "efficient"]
    monkeypatch.setattr(sdpa, "_sdpa", lambda *given, **options: given[3:])
    assert sdpa._direct_function(facts(rg.causal(), 16384), None, True)(q, k, v) == (None, 0.0, True)
    long = sdpa._direct_function(facts(rg.causal() & rg.window(5), 16384), mask, False)(q, k, v)
    assert long == (mask, 0.0, False) and len(kernels.calls) == 2


@pytest.mark.parametrize("lacking", ["other arguments", "not built"])
def test_a_pytorch_with_other_kernels_runs_its_own_choice(monkeypatch, lacking):
    flags = torch.backends.cuda
    monkeypatch.setattr(flags, "is_flash_attention_available", lambda: lacking != "not built")
    if lacking == "other arguments":
        monkeypatch.setattr(compat, "flash_schema", lambda name: f"aten::{name}(Tensor q)")
    sdpa._kernel.cache_clear()
    try:
        q, k, v = qkv(7, 7)
        o = sdpa._without_plan(q, k, v, None, True, 0.25)
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
        assert sdpa._kernel(sdpa.FLASH) is None and torch.equal(o, expected)
        assert (sdpa._kernel(sdpa.EFFICIENT) is None) is (lacking == "other arguments")
        monkeypatch.undo()
        monkeypatch.setattr(flags, "is_flash_attention_available", lambda: True)
        sdpa._kernel.cache_clear()
        assert sdpa._kernel(sdpa.FLASH) is not None and sdpa._kernel(sdpa.EFFICIENT) is not None
    finally:
        sdpa._kernel.cache_clear()


def test_a_kernel_that_is_not_allowed_does_not_run(monkeypatch):
    kernels, (q, k, v) = Kernels(monkeypatch), qkv(7, 7)
    mask = torch.zeros(7, 7, dtype=q.dtype)
    monkeypatch.setattr(sdpa, "_sdpa", lambda *given, **options: given)
    for allowed, runs in ((SDPBackend.FLASH_ATTENTION, None), (SDPBackend.EFFICIENT_ATTENTION, mask)):
        with sdpa_kernel(allowed):
            results = [sdpa._without_plan(q, k, v, x, False, 0.25) for x in (None, mask)]
        assert [isinstance(x, tuple) for x in results] == [x is not runs for x in (None, mask)]
    assert kernels.calls == ["flash", "efficient"]


@pytest.fixture
def on_gpu(monkeypatch):
    """Calls are chosen as if their tensors were on a GPU."""
    original = attention.facts_of
    monkeypatch.setattr(attention, "facts_of", lambda call: replace(original(call), device="cuda:0"))


@pytest.mark.parametrize("term", ["none", "bias", "table", "lengths"])
def test_attention_runs_these_kernels(monkeypatch, on_gpu, term):
    q, k, v = qkv(7, 7)
    options = {
        "none": {"pattern": rg.causal()},
        "bias": {"bias": torch.randn(4, 7, 7, generator=torch.Generator().manual_seed(2)).to(q.dtype)},
        "table": {"pattern": torch.ones(7, 7, dtype=torch.bool).tril(2)},
        "lengths": {"lengths": torch.tensor([7, 3, 1])},
    }[term]
    exact = rg.attention(*(x.double() for x in (q, k, v)), **options, backend="reference")
    with monkeypatch.context() as patched:
        kernels = Kernels(patched)
        with torch.no_grad():
            for _ in range(2):
                o = rg.attention(q, k, v, **options, backend="sdpa")
                assert (o.double() - exact).abs().max() < 4e-3
    assert kernels.calls == ["flash" if term == "none" else "efficient"] * 2
    PREPARED.clear()


def test_a_call_that_something_observes_is_pytorchs_own(monkeypatch, on_gpu):
    q, k, v = qkv(7, 7)
    seen = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(sdpa, "_kernel", None)  # whoever calls it fails
    with torch.no_grad(), Watching():
        rg.attention(q, k, v, backend="sdpa")
    assert seen


def test_costs_know_the_kernel():
    q = torch.empty(2, 3, 8, 16, device="meta", dtype=torch.bfloat16)
    mask = torch.empty(2, 3, 8, 8, device="meta", dtype=torch.bfloat16)
    for capability in ((8, 0), (9, 0)):
        kernels = [
            kernel_of(Call(q, q, q, x, 0.0, False, 1, 1, "", no_plan=True), "cuda", Gpu(capability))
            for x in (None, mask)
        ]
        assert kernels == ["flash", "efficient"]


class Model(torch.nn.Module):
    """Heads-first queries, whose layout PyTorch's kernels for heads-behind-positions outputs do not keep."""

    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.project = torch.nn.Linear(64, 64)

    def forward(self, x):
        q = self.project(x).unflatten(-1, (4, 16)).transpose(1, 2).contiguous()
        return rg.attention(q, q[:, :2], q[:, :2], **self.options, backend="sdpa")


@pytest.mark.parametrize("term", ["dense", "a table", "training"])
def test_the_price_of_a_model_is_that_of_these_kernels(monkeypatch, term):
    from regard.costs.trace import attention as traced

    chosen, original = [], traced.kernel_of

    def kernel(call, device, gpu):
        name = original(call, device, gpu)
        chosen.append((name, call.k.shape[1], call.computed // call.q.shape[:2].numel()))
        return name

    monkeypatch.setattr(traced, "kernel_of", kernel)
    table = torch.ones(7, 7, dtype=torch.bool).tril()
    model = Model(pattern=table if term == "a table" else rg.causal()).to(torch.bfloat16)
    x = torch.zeros(2, 7, 64, dtype=torch.bfloat16)
    rg.cost(model, x, device="cuda", train=term == "training").memory  # noqa: B018 (it is computed when read)
    expected = {"dense": ("flash", 2, 28), "a table": ("efficient", 4, 49), "training": ("cudnn", 2, 28)}[
        term
    ]
    assert expected in chosen
    assert ("cudnn", 2, 28) not in chosen or term == "training"


@pytest.mark.compiled
@pytest.mark.parametrize("term", ["dense", "a table"])
def test_a_compiled_graph_leaves_the_choice_to_pytorch(monkeypatch, on_gpu, term):
    q, k, v = qkv(7, 7)
    pattern = torch.ones(7, 7, dtype=torch.bool).tril() if term == "a table" else rg.causal()
    exact = rg.attention(*(x.double() for x in (q, k, v)), pattern, backend="reference")
    for name in ("_kernel", "avoids_plan"):  # whose conditions on sizes would guard the graph
        monkeypatch.setattr(sdpa, name, None)  # whoever calls it fails
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: rg.attention(*x, pattern, backend="sdpa"), backend="eager", fullgraph=True
    )
    with torch.no_grad():
        assert (compiled(q, k, v).double() - exact).abs().max() < 4e-3
