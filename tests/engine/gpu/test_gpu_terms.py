"""A pattern per head, trees, listed blocks, grids, padding and random compositions on a GPU, against the formula.

PYTHONPATH=src:tests/helpers python3 -m pytest tests/engine/gpu/test_gpu_terms.py -q
"""

import random

import pytest
import torch

import regard as rg
from regard.engine import flash4
from regard.engine.attention import call_of, normalized
from regard.errors import BackendError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
f64 = torch.float64


def formula(q, k, v, options):
    """Every table dense, in the dtype of the inputs."""
    call = normalized(call_of(q, k, v, **options)).hide()
    k, v = (rg.reference.repeat_heads(x, q.shape[1]) for x in (call.k, call.v))
    terms = {"scale": call.scale, "softcap": call.softcap, "sink_logits": call.sink_logits}
    allowed, bias = call.allowed(), call.dense_bias()
    if terms["sink_logits"] is not None:
        terms["sink_logits"] = terms["sink_logits"].to(q.dtype)
    return rg.reference.attend(call.q, k, v, allowed, bias=bias, **terms).o


def with_gradients(function, inputs, do):
    inputs = [x.detach().requires_grad_() for x in inputs]
    o = function(*inputs)
    return [o, *torch.autograd.grad((o.to(do.dtype) * do).sum(), inputs)]


def check(q, k, v, options, backend, where):
    """max|fast − ref| ≤ 2 · max|plain − ref| + 4 ulp of max|ref|."""
    do = torch.randn(
        *q.shape[:3], v.shape[-1], device=q.device, generator=torch.Generator("cuda").manual_seed(1)
    )
    exact = [x.to(f64) for x in (q, k, v)]
    ref = with_gradients(lambda *x: formula(*x, options), exact, do.to(f64))
    plain = with_gradients(lambda *x: formula(*x, options), (q, k, v), do)
    fast = with_gradients(lambda *x: rg.attention(*x, **options, backend=backend), (q, k, v), do)
    for name, r, p, f in zip(("o", "dq", "dk", "dv"), ref, plain, fast):
        assert f.isfinite().all(), f"{where}, {name}: not finite"
        limit = 2 * (p.to(f64) - r).abs().max() + 4 * torch.finfo(q.dtype).eps * r.abs().max()
        error = (f.to(f64) - r).abs().max()
        assert error <= limit, f"{where}, {name}: {error:.2e} where {limit:.2e} is allowed"


def qkv(b, h, h_kv, n, m, d, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (b, h, n, d), (b, h_kv, m, d), (b, h_kv, m, d)
    return tuple(torch.randn(s, device="cuda", generator=generator).to(dtype) for s in shapes)


N = 1024
LIST = torch.randint(-1, 16, (16, 3), generator=torch.Generator().manual_seed(1))
PARENTS = torch.tensor([-1] + [i - 1 if i % 128 else 40 for i in range(1, N)])
HEADS = [rg.causal() & rg.window(64), rg.causal(), rg.causal() & rg.window(64), rg.causal() & rg.every(16)]


def patterns():
    return {
        "per head": HEADS,
        "tree": rg.tree(PARENTS.cuda()),
        "list": rg.causal() & rg.selected(LIST.cuda(), 64),
        "grid": rg.neighborhood((32, 32), 7),
        "shifted grid": rg.neighborhood((32, 32), 5, border="shifted"),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["per head", "tree", "list", "grid", "shifted grid"])
def test_patterns_that_data_heads_and_grids_decide(name, dtype):
    q, k, v = qkv(2, 4, 2, N, N, 64, dtype)
    check(q, k, v, {"pattern": patterns()[name]}, "auto", name)


GRIDS = [
    rg.neighborhood((32, 128), (15, 31), border="shifted"),
    rg.neighborhood((64, 64), 7),
    rg.neighborhood((70, 60), 9, step=(1, 2)),
    rg.neighborhood((10, 20, 30), (3, 5, 7), causal=(True, False, False)),
    rg.neighborhood((5000,), 33, border="shifted"),
]


@pytest.mark.parametrize("pattern", GRIDS, ids=repr)
def test_grids_run_by_their_lines(pattern):
    for d, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (40, torch.float32)):
        q, k, v = qkv(1, 2, 1, pattern.size, pattern.size, d, dtype)
        assert rg.explain(q, k, v, pattern).backend == "triton"
        check(q, k, v, {"pattern": pattern}, "auto", "lines of a grid")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_left_padding_and_offsets_per_row(dtype):
    q, k, v = qkv(3, 4, 2, 300, 700, 64, dtype)
    spans = torch.tensor([[0, 700], [130, 700], [500, 650]], device="cuda")
    for pattern in (rg.causal(), rg.causal() & (rg.window(100) | rg.sinks(8))):
        check(q, k, v, {"pattern": pattern, "lengths": spans}, "auto", f"{pattern!r}, left padding")
        rows = torch.tensor([400, 10, 399], device="cuda")
        check(q, k, v, {"pattern": pattern, "at": rows}, "auto", f"{pattern!r}, offsets")


def sample(seed):
    r = random.Random(seed)
    words = [
        rg.window(r.randint(1, 90)),
        rg.every(r.randint(2, 40)),
        rg.sinks(r.randint(1, 9)),
        rg.blocks(r.randint(8, 90)),
    ]
    pattern = rg.causal() & (r.choice(words) | r.choice(words))
    h_kv, group, b = r.choice([1, 2]), r.choice([1, 2, 4]), r.choice([1, 3])
    h, m = h_kv * group, r.choice([65, 300, 520])
    n = r.choice([1, m, m // 3])
    dtype = r.choice([torch.float32, torch.float16, torch.bfloat16])
    options = {
        "pattern": pattern if r.random() < 0.6 else [r.choice([pattern, rg.causal()]) for _ in range(h)]
    }
    generator = torch.Generator("cuda").manual_seed(seed)
    if r.random() < 0.4:
        options["softcap"] = r.choice([1.0, 20.0])
    if r.random() < 0.4:
        options["sink_logits"] = torch.randn(h, device="cuda", generator=generator)
    if r.random() < 0.4:
        first = torch.randint(0, m // 2, (b,), device="cuda", generator=generator)
        options["lengths"] = torch.stack([first, torch.full_like(first, m - 3)], 1)
    if r.random() < 0.3:
        options["at"] = torch.randint(0, m, (b,), device="cuda", generator=generator)
    return qkv(b, h, h_kv, n, m, r.choice([32, 64, 80]), dtype, seed), options


@pytest.mark.parametrize("seed", range(60))
def test_random_compositions(seed):
    (q, k, v), options = sample(seed)
    for backend in ("auto", "triton"):
        try:
            rg.explain(q.requires_grad_(), k, v, **options, backend=backend)
        except BackendError:
            continue
        check(q, k, v, options, backend, f"seed {seed}, {backend}, {q.dtype}, {options}")


# Softcap, sinks and lengths in the kernels for Hopper.

LINES = rg.window(100) | rg.every(64)  # blocks of two progressions
SEVERAL = rg.causal() & (rg.window(64) | rg.dilated(64, 8))  # passes that continue from one another
MIXED = rg.window(64) | rg.rows(64)  # tiles of global rows, which programs share
TERM_PATTERNS = {
    "dense": rg.full(),
    "causal": rg.causal(),
    "window": rg.causal() & rg.window(70),
    "lines": LINES,
    "several passes": SEVERAL,
    "global rows": MIXED,
    "empty rows": rg.window(40) & ~rg.rows(3) & rg.sinks(500),
    "grid": rg.neighborhood((35, 20), 7),
    "documents": lambda: rg.causal() & rg.documents(PACKED[0].cuda()),
    "documents by row": lambda: rg.window(90) & rg.documents(PACKED.cuda()),
}
PACKED = torch.stack([torch.arange(700) // size for size in (150, 64, 23)])
TERMS = {
    "softcap": {"softcap": 5.0},
    "sink": {"sink_logits": "randn"},
    "lengths": {"lengths": [700, 0, 131]},
    "left padding": {"lengths": [[0, 700], [650, 700], [77, 500]]},
    "all": {"softcap": 30.0, "sink_logits": "randn", "lengths": [[3, 700], [0, 64], [600, 690]]},
}


def term_options(name, pattern, h):
    options = {"pattern": pattern() if callable(pattern) else pattern} | TERMS[name]
    if "sink_logits" in options:
        options["sink_logits"] = 2 * torch.randn(
            h, device="cuda", generator=torch.Generator("cuda").manual_seed(7)
        )
    if "lengths" in options:
        options["lengths"] = torch.tensor(options["lengths"], device="cuda")
    return options


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="not a Hopper GPU"
)


@on_hopper
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("name", TERM_PATTERNS)
def test_terms_run_on_the_kernels_for_hopper(name, term):
    pattern = TERM_PATTERNS[name]
    for d, h_kv, dtype in ((64, 4, torch.bfloat16), (128, 2, torch.float16), (80, 1, torch.bfloat16)):
        q, k, v = qkv(3, 4, h_kv, 700, 700, d, dtype)
        options = term_options(term, pattern, 4)
        explained = rg.explain(q.requires_grad_(), k, v, **options, backend="triton")
        assert explained.variant.startswith("Hopper"), explained
        check(q, k, v, options, "triton", f"{name}, {term}, {d}, {dtype}")


@on_hopper
@pytest.mark.parametrize("term", TERMS)
def test_terms_of_wide_heads_offsets_and_heads_inside(term):
    q, k, v = qkv(3, 2, 2, 700, 700, 256, torch.bfloat16)
    check(q, k, v, term_options(term, rg.causal() & rg.window(200), 2), "triton", f"{term}, heads of 256")
    q, k, v = qkv(3, 4, 2, 300, 700, 128, torch.bfloat16)
    check(q, k, v, term_options(term, SEVERAL, 4) | {"at": 250}, "triton", f"{term}, offset")
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(3, 4, 2, 700, 700, 64, torch.bfloat16)
    )
    check(q, k, v, term_options(term, rg.causal(), 4), "triton", f"{term}, heads inside")


@on_hopper
@pytest.mark.parametrize(
    "name", ["causal", "lines", "several passes", "global rows", "empty rows", "documents"]
)
def test_gradients_of_sinks_and_of_the_log_sum_exp_are_the_formulas(name):
    """The kernels give delta where one pass has every row; elsewhere it is computed beside them."""
    for term in ("sink", "all"):
        q, k, v = qkv(3, 4, 2, 700, 700, 64, torch.bfloat16)
        options = term_options(term, TERM_PATTERNS[name], 4)
        do, dlse = torch.randn_like(q), torch.randn(3, 4, 700, device="cuda")
        found = {}
        for kind, backend, dtype in (("fast", "triton", None), ("exact", "reference", f64)):
            inputs = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (q, k, v)]
            sink = options["sink_logits"].detach().to(dtype or torch.float32).requires_grad_()
            o, lse = rg.attention(
                *inputs, **(options | {"sink_logits": sink}), return_lse=True, backend=backend
            )
            there = ~lse.isinf()
            loss = (o * do.to(o.dtype)).sum() + torch.where(there, lse, 0.0).mul(dlse).sum()
            found[kind] = [lse, *torch.autograd.grad(loss, [*inputs, sink])]
        for of, fast, exact in zip(("lse", "dq", "dk", "dv", "dsink"), *found.values()):
            fast, exact = fast.to(f64), exact.to(f64)
            assert torch.equal(fast.isinf(), exact.isinf()), f"{name}, {term}, {of}"
            apart = (fast - exact).nan_to_num(0.0).norm() / exact.nan_to_num(0.0, 0.0, 0.0).norm()
            assert apart < 1e-2, f"{name}, {term}, {of}: {apart:.1e}"


@on_hopper
def test_hidden_keys_may_hold_anything():
    q, k, v = qkv(3, 4, 2, 700, 700, 128, torch.bfloat16)
    lengths = torch.tensor([[10, 600], [0, 64], [333, 334]], device="cuda")
    for pattern in (rg.causal(), LINES, SEVERAL, rg.neighborhood((35, 20), 7)):
        found = []
        for junk in (0.0, torch.nan, torch.inf):
            j = torch.arange(700, device="cuda")
            hidden = ((j < lengths[:, :1]) | (j >= lengths[:, 1:]))[:, None, :, None]
            inputs = [q, *(x.masked_fill(hidden, junk) for x in (k, v))]
            attend = lambda *x, p=pattern: rg.attention(*x, p, lengths=lengths, backend="triton")  # noqa: E731
            found.append(with_gradients(attend, inputs, torch.ones_like(q)))
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), f"{pattern!r}"


@on_hopper
def test_sinks_of_minus_infinity_and_a_high_softcap_change_nothing():
    q, k, v = qkv(2, 4, 2, 700, 700, 128, torch.bfloat16)
    pattern = rg.causal() & rg.window(90)
    plain = rg.attention(q, k, v, pattern, backend="triton")
    none = torch.full((4,), -torch.inf, device="cuda")
    assert torch.equal(rg.attention(q, k, v, pattern, sink_logits=none, backend="triton"), plain)
    for softcap in (1000.0, 1e6):  # by the kernels for Hopper, and by the general ones
        capped = rg.attention(q, k, v, pattern, softcap=softcap, backend="triton")
        assert (capped - plain).abs().max() <= 2e-2 * plain.abs().max()


# FlashAttention-4's kernels, where its package is installed.

needs_flash4 = pytest.mark.skipif(flash4.version() is None, reason="flash-attn-4 is not installed")
# cutlass, of its own names and of arguments that it converts itself
warns = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Argument aux_data:UserWarning")
BANDS = {
    "full": rg.full(),
    "causal": rg.causal(),
    "window": rg.window(90, 40),
    "both": rg.causal() & rg.window(90),
    "prefix": rg.causal() | rg.prefix(500),
}


@needs_flash4
@warns
@pytest.mark.parametrize("name", BANDS)
def test_flash4_is_exact_and_gives_the_same_bits_twice_if_asked(name):
    for d, heads, dtype in ((128, (4, 2), torch.bfloat16), (64, (2, 2), torch.float16)):
        q, k, v = qkv(2, *heads, 700, 1000, d, dtype)
        for at in (None, 0, 250):
            options = {"pattern": BANDS[name], "at": at}
            check(q, k, v, options, "flash4", f"{name}, {d}, at={at}")
            sink = torch.randn(heads[0], device="cuda")
            check(q, k, v, options | {"sink_logits": sink}, "flash4", f"{name}, {d}, at={at}, sink")
        attend = lambda *x, p=BANDS[name]: rg.attention(*x, p, at=250, backend="flash4")  # noqa: E731
        assert_same_bits(attend, q, k, v)


@needs_flash4
@warns
@pytest.mark.parametrize("d", flash4.HEAD_DIMS_GRAD)
def test_gradients_of_flash4_are_exact_for_every_width_that_it_takes(d):
    for heads, n in (((4, 4), 700), ((4, 2), 1024)):
        q, k, v = qkv(2, *heads, n, n, d, torch.bfloat16)
        for pattern in (rg.causal(), rg.window(64)):
            check(q, k, v, {"pattern": pattern}, "flash4", f"{pattern!r}, {d} wide, {heads} heads")


def assert_same_bits(attend, q, k, v):
    """Twice, with deterministic algorithms."""
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        first, second = (with_gradients(attend, (q, k, v), torch.ones_like(q)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))


@needs_flash4
@warns
@pytest.mark.parametrize("name", ["full", "causal", "both"])
def test_flash4_takes_each_document_as_a_sequence(name):
    lengths = {1: [1, 127, 128, 129, 315], 2: [300, 5, 5, 390]}
    rows = [torch.repeat_interleave(torch.arange(len(x)), torch.tensor(x)) for x in lengths.values()]
    for ids in (rows[0], torch.stack(rows)):
        for d, heads, dtype in ((128, (4, 2), torch.bfloat16), (64, (2, 2), torch.float16)):
            q, k, v = qkv(2, *heads, 700, 700, d, dtype)
            pattern = rg.documents(ids.cuda()) & BANDS[name]
            check(q, k, v, {"pattern": pattern}, "flash4", f"documents, {name}, {d}")
            behind = [
                x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)
            ]  # heads behind positions
            check(*behind, {"pattern": pattern}, "flash4", f"documents, {name}, {d}, heads behind positions")
            sink = torch.randn(heads[0], device="cuda")
            check(
                q, k, v, {"pattern": pattern, "sink_logits": sink}, "flash4", f"documents, {name}, {d}, sink"
            )
            assert_same_bits(lambda *x, p=pattern: rg.attention(*x, p, backend="flash4"), q, k, v)
            _, lse = rg.attention(q, k, v, pattern, return_lse=True, backend="flash4")
            exact = rg.attention(
                q.double(), k.double(), v.double(), pattern, return_lse=True, backend="reference"
            )
            torch.testing.assert_close(lse.double(), exact[1], atol=2e-3, rtol=1e-3)
            x = q.detach().requires_grad_()
            o = rg.attention(x, k, v, pattern, backend="flash4")
            (dq,) = torch.autograd.grad(o.float().square().sum(), x, create_graph=True)
            (again,) = torch.autograd.grad(dq.float().square().sum(), x)
            assert again.isfinite().all() and again.abs().sum() > 0


@needs_flash4
@warns
def test_flash4_gives_the_log_sum_exp_and_can_be_differentiated_twice():
    q, k, v = (x.requires_grad_() for x in qkv(2, 4, 2, 700, 1000, 128, torch.bfloat16))
    pattern = rg.causal() & rg.window(90)
    found = rg.attention(q, k, v, pattern, return_lse=True, backend="flash4")
    exact = rg.attention(q.double(), k.double(), v.double(), pattern, return_lse=True, backend="reference")
    torch.testing.assert_close(found[1].double(), exact[1], atol=2e-3, rtol=1e-3)
    of_lse, theirs = (torch.autograd.grad(x[1].sum(), (q, k), retain_graph=True) for x in (found, exact))
    torch.testing.assert_close(of_lse, theirs, atol=2e-2, rtol=2e-2)
    (dq,) = torch.autograd.grad(found[0].float().square().sum(), q, create_graph=True)
    (again,) = torch.autograd.grad(dq.float().square().sum(), q)
    assert again.isfinite().all() and again.abs().sum() > 0
    explained = rg.explain(q, k, v, pattern, backend="flash4")
    assert explained.backend == "flash4" and f"flash-attn-4 {flash4.version()}" in explained.variant


@needs_flash4
@warns
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_flash4_joins_sinks_of_any_dtype_and_differentiates_them(dtype):
    q, k, v = (x.requires_grad_() for x in qkv(2, 4, 2, 700, 700, 64, torch.bfloat16))
    sink = torch.tensor([2.0, -1.0, 0.5, -torch.inf], device="cuda", dtype=dtype, requires_grad=True)
    inputs, found = (q, k, v, sink), {}
    for pattern in (rg.causal(), rg.causal() | rg.prefix(200)):
        for backend in ("flash4", "reference"):
            terms = {"sink_logits": sink, "return_lse": True, "backend": backend}
            o, lse = rg.attention(*inputs[:3], pattern, **terms)
            loss = (o.float() * torch.linspace(-1, 1, 64, device="cuda")).sum() + lse.sum() / 9
            found[backend] = [o, lse, *torch.autograd.grad(loss, inputs)]
        for fast, exact in zip(*found.values()):
            assert fast.dtype == exact.dtype
            assert (fast.double() - exact.double()).abs().max() <= 2e-2 * exact.double().abs().max()
