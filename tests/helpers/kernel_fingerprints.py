"""A hash of the machine code (PTX for sm_90) of every kernel that representative calls launch, without a GPU.

    PYTHONPATH=src python tests/helpers/kernel_fingerprints.py OUT.json [hopper|triton|short|fused|loss]
    python tests/helpers/kernel_fingerprints.py --compare OLD.json NEW.json      1 if a kernel differs

Calls are made on CPU tensors; every launch is intercepted, specialized as Triton specializes it, and compiled down to
PTX. Names and line information are normalized, so equal hashes mean that the kernels run at the same speed.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

TYPES = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int32": "*i32", "int64": "*i64"}


class Compiled(Exception):
    """Ends a compilation as soon as its PTX is known."""


def normalized(ptx: str) -> str:
    """The PTX without comments, line information and names that carry a module's path."""
    lines = [line.split("//")[0].rstrip() for line in ptx.splitlines()]
    lines = [line for line in lines if line.strip() and not re.match(r"\s*\.(loc|file)\b", line)]
    text = "\n".join(lines).split("\t.section\t.debug")[0]
    names = re.findall(r"\.(?:entry|func)\s*(?:\([^)]*\)\s*)?([\w$.]+)\s*\(", text)
    for nth, name in enumerate(dict.fromkeys(names)):
        text = re.sub(
            rf"{re.escape(name)}(?![\w$.])|{re.escape(name)}(?=_param_|_retval)", f"KERNEL_{nth}", text
        )
    return text


def ptx_of(kernel, args, kwargs) -> str:
    """The kernel as Triton would specialize it for these arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    names = kernel.arg_names
    options = {k: v for k, v in kwargs.items() if k not in names}
    values = dict(zip(names, args)) | {k: v for k, v in kwargs.items() if k in names}
    assert len(values) == len(names), set(names) - set(values)
    params = {p.name: p for p in kernel.params}
    signature, constants, attrs = {}, {}, {}
    for at, name in enumerate(names):
        value, param = values[name], params[name]
        if param.is_constexpr or value is None:
            signature[name], constants[at,] = "constexpr", value
        elif hasattr(value, "data_ptr"):
            signature[name] = TYPES[str(value.dtype).removeprefix("torch.")]
            if value.data_ptr() % 16 == 0:
                attrs[at,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not param.do_not_specialize:
            signature[name], constants[at,] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[at,] = [["tt.divisibility", 16]]
    gluon = type(kernel).__name__ == "GluonJITFunction"
    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source

        options.pop("num_stages", None)
    else:
        from triton.compiler import ASTSource as Source
    found = []
    inner = CUDABackend.make_ptx

    def stop(self, *given, **more):
        found.append(inner(self, *given, **more))
        raise Compiled

    source = Source(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    with mock.patch.object(CUDABackend, "make_ptx", stop):
        try:
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        except Compiled:
            return normalized(found[0])
    raise AssertionError("no PTX was made")


def hopper_on_cpu() -> None:
    """Let the Hopper variant take CPU tensors: its condition on the device is left out."""
    from regard.engine.cuda import launches

    launches.multiprocessors = lambda device: 132
    launches.is_hopper = lambda device: True


def calls():
    """(name, function) of every call that is made."""
    import torch

    from regard.engine.call import NO_SEED, Extras, Options
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task
    from regard.pattern import blocks, causal, dilated, every, full, rows, strided, window

    sparse = causal() & (window(128) | every(64))
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32

    def attend(pattern, n, d=64, dtype=bf16, h=2, h_kv=2, m=None, d_v=None, lse=False, **more):
        def run():
            shapes = (1, h, n, d), (1, h_kv, m or n, d), (1, h_kv, m or n, d_v or d)
            q, k, v = (torch.zeros(s, dtype=dtype) for s in shapes)
            extras = Extras(
                torch.zeros(h, 2 * more["reach"] + 1) if "reach" in more else None,
                torch.zeros(h) if "slopes" in more else None,
                torch.tensor(more["lengths"]) if "lengths" in more else None,
                more.get("seed", NO_SEED),
            )
            given = Options(pattern, 0, 1, d**-0.5, more.get("dropout_p", 0.0), more.get("softcap"))
            made = task(q, v, given, extras)
            o, logs = host.forward(q, k, v, made, extras)
            grads = torch.zeros_like(o), torch.zeros_like(logs) if lse else None
            host.backward((q, k, v, o, logs), grads, made, extras, "reach" in more or "slopes" in more)

        return run

    hopper = [(sparse, 64), (sparse, 128), (window(128) | every(64), 128), (window(40) - dilated(3, 5), 64)]
    hopper += [(causal(), 64), (dilated(64, 16), 128), (every(64), 64)]
    for pattern, d in hopper:
        yield f"hopper {pattern!r} d={d}", attend(pattern, 8192 if pattern is sparse else 3072, d)
    yield "hopper grouped", attend(sparse, 8200, 128, half, h=4, lse=True)
    yield "hopper, narrower heads", attend(sparse, 8192, 96)
    yield "hopper, then rows", attend(window(64) | rows(64) | every(64), 8192, 128)
    yield "hopper, then passes that go on", attend(causal() & (window(127) | strided(128)), 8192, 128)
    for d, dtype in ((80, bf16), (256, half), (32, single), (128, single)):
        yield f"triton sparse d={d} {dtype}", attend(sparse, 2304, d, dtype)
    one = {"h": 1, "h_kv": 1}
    yield "triton lengths, lse", attend(window(3) | every(8), 300, 64, half, lse=True, lengths=[200], **one)
    yield "triton grouped", attend(window(4) | every(8), 300, 32, single, h=4, lengths=[200])
    yield "triton table", attend(full(), 2304, 64, reach=300)
    yield "triton table over rows", attend(window(2) | rows(8), 2304, 128, reach=40)
    yield "triton slopes", attend(sparse, 700, 64, slopes=True)
    yield "triton table and slopes", attend(window(3) | every(8), 700, 64, half, reach=6, slopes=True)
    yield "triton dropout", attend(sparse, 700, 128, dropout_p=0.2, seed=1 << 40)
    yield "triton softcap, left padding", attend(sparse, 700, 128, softcap=20.0, lengths=[[5, 600]])
    yield "triton split rows", attend(full(), 5, 32, single, m=8192)
    yield "triton one query", attend(causal() & (window(1024) | every(64)) | blocks(512), 1, 128, h=8, m=8192)
    yield "triton one query, pieces, lengths", attend(full(), 1, 64, half, h=8, m=8192, lengths=[[5, 600]])
    yield "triton passes that go on", attend(window(3) | rows(13, 5) | rows(17, 1), 2304, 32)
    yield "triton wide values", attend(sparse, 2304, 16, d_v=40)
    for d, dtype in ((64, bf16), (128, half), (64, single)):
        yield f"short {d} {dtype}", attend(sparse, 512, d, dtype)
    yield "short, grouped, lse", attend(blocks(64) | every(64), 300, h=4, m=517, lse=True)
    yield from fused(torch)
    yield from losses(torch)


def fused(torch):
    """The kernels that read a fused projection."""
    import regard.nn  # noqa: F401 (defines the operation)

    def run(heads, kv_heads, d, n, m, causal, dropout_p, lengths, dtype):
        def call():
            own = 2 * kv_heads * d
            x = torch.zeros(2, n, heads * d + (0 if m else own), dtype=dtype)
            c = torch.zeros(2, m, own, dtype=dtype) if m else None
            long = torch.tensor(lengths) if lengths else None
            seed = torch.zeros(1, dtype=torch.int64) if dropout_p else None
            options = heads, kv_heads, d, d, causal, d**-0.5, dropout_p
            o = torch.ops.regard.fused_qkv(x, c, long, seed, *options)
            torch.ops.regard.fused_qkv_backward(o, x, c, long, seed, *options)

        return call

    bf16, half, single = torch.bfloat16, torch.float16, torch.float32
    yield "fused causal", run(2, 2, 64, 60, None, True, 0.0, None, bf16)
    yield "fused dropout", run(2, 2, 64, 64, None, False, 0.1, [60, 5], half)
    yield "fused grouped", run(4, 2, 32, 33, None, False, 0.0, [33, 5], bf16)
    yield "fused context", run(2, 2, 64, 128, 100, False, 0.1, [33, 5], bf16)
    for n, m, dtype in ((60, 20, bf16), (20, 60, bf16), (33, 100, half)):
        yield f"fused context of unequal length {n} x {m}", run(2, 2, 64, n, m, False, 0.1, [m, 5], dtype)
    yield "fused single", run(2, 1, 16, 17, 19, False, 0.0, [17, 5], single)


def losses(torch):
    """The kernel of the cross-entropy."""
    root = Path(find_spec("regard").origin).parent
    for file in (root / "training").rglob("*.py"):  # the one that defines the operation
        if '"regard::cross_entropy"' in file.read_text(encoding="utf-8"):
            import_module(".".join(("regard", *file.relative_to(root).with_suffix("").parts)))

    def run(vocab, smoothing, biased, dtype, learns=True):
        def call():
            rows, table = torch.zeros(5, 8, dtype=dtype), torch.zeros(vocab, 8, dtype=dtype)
            bias = torch.zeros(vocab, dtype=dtype) if biased else None
            y = torch.zeros(5, dtype=torch.int64)
            needs = [learns, learns, learns and biased]
            torch.ops.regard.cross_entropy(rows, table, bias, y, smoothing, 5, needs)

        return call

    yield "loss plain", run(1000, 0.0, False, torch.bfloat16)
    yield "loss smoothed, blocks", run(9000, 0.1, False, torch.bfloat16)
    yield "loss bias", run(1000, 0.1, True, torch.float32)
    yield "loss evaluated", run(1000, 0.1, False, torch.float32, learns=False)


def fingerprint(kernel, args, kwargs) -> str:
    try:
        return hashlib.sha256(ptx_of(kernel, args, kwargs).encode()).hexdigest()[:24]
    except Exception as error:
        return f"failed: {error!r}"[:600]


def fingerprints(path: str, prefix: str = "") -> None:
    """Stores the hash of each launch of each call whose name begins with the prefix, after each call."""
    from triton.runtime.jit import JITFunction

    hopper_on_cpu()
    out: dict[str, str] = {}
    known: dict[str, str] = {}
    for name, call in calls():
        if not name.startswith(prefix):
            continue
        made = []
        with mock.patch.object(
            JITFunction, "run", lambda self, *a, grid, warmup, made=made, **k: made.append((self, grid, a, k))
        ):
            call()
        assert made, name
        for nth, (kernel, grid, args, kwargs) in enumerate(made):
            key = repr((kernel.__name__, [str(getattr(x, "dtype", x)) for x in args], kwargs))
            if key not in known:
                known[key] = fingerprint(kernel, args, kwargs)
            out[f"{name} | {nth} {kernel.__name__} grid {grid[0]}"] = known[key]
        print(f"{name}: {len(made)} launches", flush=True)
        with open(path, "w") as file:
            json.dump(out, file, indent=1)


def compare(old: str, new: str) -> int:
    with open(old) as a, open(new) as b:
        first, second = json.load(a), json.load(b)
    first, second = (
        {re.sub(r"(\d+) \w+ grid", r"\1 grid", k): v for k, v in x.items()} for x in (first, second)
    )
    wrong = [name for name in second if first.get(name) != second[name]]
    print(f"{len(first)} and {len(second)} launches, {len(set(first.values()))} kernels; {len(wrong)} differ")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        sys.exit(compare(*sys.argv[2:]))
    fingerprints(*sys.argv[1:])
