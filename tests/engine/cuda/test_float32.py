"""Products of float32 on a GPU: which kernels are prepared for them, and that these compile for Hopper (sm_90).

Run as a script, it compiles kernels and prints a line of JSON for each; it needs no GPU.
"""

import json
import subprocess
import sys
from unittest import mock

import pytest
import torch

from regard.engine.call import Options
from regard.engine.cuda import call as module
from regard.engine.cuda.call import PLAIN, SINGLE, SPLIT, CallLayout, contiguous, task
from regard.pattern import causal, every, window

SPARSE = causal() & (window(128) | every(64))
SHARED = 227 * 1024  # bytes that a program may take of a multiprocessor of Hopper
WIDTHS = 32, 64, 128, 256


def layout(d, n=8192, device="cpu", dtype=torch.float32, softcap=None):
    like = torch.empty(1, 4, n, d, device="meta", dtype=dtype)
    own = task(like, like, Options(SPARSE, 0, 1, d**-0.5, softcap=softcap), PLAIN)
    return CallLayout(own, (contiguous(1, 4, n, d),) * 5, dtype, torch.device(device))


@pytest.mark.parametrize("d", [32, 64, 80, 128, 256])
def test_float32_is_split_on_hopper_only_and_unless_tf32_is_allowed(d, monkeypatch):
    from regard.engine.cuda.triton import forward

    def kinds(splits, **more):
        call = layout(d, **more)
        for of in (module, forward):
            monkeypatch.setattr(of, "splits_float32", lambda device: splits)
        return call.configs, forward.static(SPARSE, call.configs.forward, call).PRECISION

    wide = module.padded(d)
    assert kinds(True) == (SPLIT[wide], "bf16x6") and kinds(False) == (SINGLE[wide], "ieee")
    capped = kinds(True, softcap=20.0)[0]
    assert (capped.forward, capped.one_launch) == (SPLIT[wide].forward, None)  # as other calls with terms
    assert kinds(True, dtype=torch.bfloat16) == (module.HALF[wide], "tf32")  # which 16 bits do not read
    allowed = mock.Mock(fp32_precision="tf32")
    with mock.patch.object(torch.backends.cuda, "matmul", allowed):
        assert kinds(True) == (SPLIT[wide], "tf32")


@pytest.mark.parametrize("capability, splits", [((8, 0), False), ((9, 0), True), ((12, 0), False)])
def test_the_tiles_of_split_products_fit_the_shared_memory_of_hopper(capability, splits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert module.splits_float32(torch.device("cuda")) == splits
    assert not module.splits_float32(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.0")  # whose capability 9 is another GPU
    assert not module.splits_float32(torch.device("cuda"))


@pytest.mark.long
def test_the_kernels_of_split_products_compile_for_hopper():
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) == len(WIDTHS) * 4 * 2 + 3, ran.stderr[-3000:]
    for made in results:
        assert made["shared"] <= SHARED, made
        assert made["products"] > 0, made  # of bfloat16, on tensor cores


def compiled(launch, pointers):
    """The kernel as Triton specializes it at its first launch. pointers: what is passed, by name or as a table."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names, left = launch.kernel.arg_names, {p.name for p in launch.kernel.params if p.do_not_specialize}
    numbers = dict(zip(names[len(pointers) :], launch.numbers))
    signature, constants, known = {}, {}, {}
    for at, name in enumerate(names):
        value = numbers.get(name)
        if at < len(pointers):
            integers = not isinstance(pointers[at], str) or pointers[at] in ("lengths", "at")
            signature[name] = "i64" if pointers[at] == "seed" else "*i32" if integers else "*fp32"
            known |= {} if signature[name] == "i64" else {(at,): [["tt.divisibility", 16]]}
        elif name in launch.sizes or (name not in left and value == 1):
            signature[name], constants[at,] = "constexpr", launch.sizes.get(name, value)
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if name not in left and signature[name] == "i32" and value % 16 == 0:
                known[at,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=known)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options))


def main():
    from regard.engine.cuda import launches, prepared
    from regard.engine.cuda.triton import forward

    named = []

    def program(inputs, launched, *rest, **more):
        named.extend(x for x in launched if x[0].grid[0] and "S" in x[0].sizes)

    launches.is_hopper, launches.multiprocessors = (lambda device: False), (lambda device: 132)
    module.splits_float32 = forward.splits_float32 = lambda device: True
    launches.Program = prepared.Program = program
    for d in WIDTHS:
        for softcap in (None, 30.0):
            call = layout(d, softcap=softcap)
            launches.forward(call._replace(tensors=call.tensors[:3]))
            launches.general_backward(call)
        if d <= 128:
            assert launches.one_launch_backward(layout(d, 512)) is not None
    seen = set()
    for launch, pointers in named:
        kind = launch.kernel.__name__, repr(launch.sizes["S"])
        if kind not in seen and launch.kernel.__name__ in ("forward_kernel", "gradients_kernel"):
            seen.add(kind)
            made = compiled(launch, pointers)
            products = made.asm["ptx"].count(".f32.bf16.bf16")
            about = {"kernel": launch.kernel.__name__, "width": int(launch.sizes["S"].DK)}
            print(json.dumps(about | {"shared": made.metadata.shared, "products": products}), flush=True)


if __name__ == "__main__":
    main()
