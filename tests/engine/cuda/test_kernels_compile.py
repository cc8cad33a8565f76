"""The streaming kernels, compiled for a Hopper GPU where there is none: what they are given is what they take.

In a process of its own: the compiler complains about its own leaks when it ends.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.pattern import causal, dilated, every, window

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SPARSE = causal() & (window(128) | every(64))
CASES = [
    ("hopper_forward", SPARSE, 64),
    ("hopper_forward", window(128) | every(64), 128),  # blocks of two progressions
    ("hopper_forward", window(40) - dilated(3, 5), 64),  # not two bounds: every pair is tested
    ("hopper_dq", SPARSE, 64),
    ("hopper_dkv", SPARSE, 64),  # the keys that every query may attend to, in parts
    ("hopper_dkv", SPARSE, 128, 1),  # the other keys, and then the parts are added up
]
SHARED = 227 * 1024  # bytes of a multiprocessor


def launches_of(which, pattern, d, n=8192):
    """What would be launched, and the configuration it is made for."""
    from regard.engine.cuda.call import CallLayout, Task, contiguous
    from regard.engine.cuda.configs import default
    from regard.engine.cuda.hopper import launches as hopper

    hopper.is_hopper, hopper.programs_at_a_time = (lambda device: True), (lambda config, device: 8)
    like, configs = contiguous(1, 2, n, d), default(d, d, torch.bfloat16)
    task = Task(pattern, 0, 1, d**-0.5, configs)
    call = CallLayout(task, (like,) * 5, torch.bfloat16, torch.device("cpu"))
    if which == "hopper_forward":
        _, program = hopper.forward(call._replace(tensors=(like,) * 3))
        return [launch for launch, *_ in program.launches], configs.hopper_forward
    if which == "hopper_dq":
        made = hopper.dq(call, hopper.passes(call, configs.hopper_dq, False))
        return [launch for launch, _ in made], configs.hopper_dq
    made, _ = hopper.dkv(call, hopper.passes(call, configs.hopper_dkv, True))
    return [launch for launch, _ in made], configs.hopper_dkv


POINTERS = {  # of 16-bit numbers (h), float32 (f) and int32 (i)
    "hopper_forward": "hhhhfii",  # q k v o lse, chunks blocks
    "hopper_dq": "hhhhhffffhii",  # q k v o do lse dlse lse2 delta dq, chunks blocks
    "hopper_dkv": "hhhhffhhfiii",  # q k v do lse2 delta dk dv part, chunks blocks slots
}


def compiled(launch):
    """The kernel as Triton specializes it at its first launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names, left = launch.kernel.arg_names, {p.name for p in launch.kernel.params if p.do_not_specialize}
    kinds = {"h": "*bf16", "f": "*fp32", "i": "*i32"}
    given = [kinds[x] for x in POINTERS[launch.kernel.__name__]]
    numbers = dict(zip(names[len(given) :], launch.numbers))
    assert len(names) == len(given) + len(numbers) + len(launch.sizes)
    signature, constants, known = {}, {}, {}
    for at, name in enumerate(names):
        value = numbers.get(name)
        if at < len(given):
            signature[name], known[at,] = given[at], [["tt.divisibility", 16]]
        elif name in launch.sizes or (name not in left and value == 1):
            signature[name], constants[at,] = "constexpr", launch.sizes.get(name, value)
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if name not in left and signature[name] == "i32" and value % 16 == 0:
                known[at,] = [["tt.divisibility", 16]]
    source = GluonASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=known)
    options = {name: value for name, value in launch.options.items() if name != "num_stages"}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main():
    """One line a case, as JSON."""
    from regard.engine.cuda.hopper.launches import programs_per_multiprocessor

    for which, pattern, d, *nth in CASES:
        launches, config = launches_of(which, pattern, d)
        launch = launches[nth[0] if nth else 0]
        made = compiled(launch)
        found = {
            "kernel": launch.kernel.__name__,
            "every_pair": launch.sizes["allowed"] is not None,
            "segments": launch.sizes["SEGMENTS"],
            "shared": made.metadata.shared * programs_per_multiprocessor(config),
            "bytes": len(made.asm["cubin"]),
            "early": launch.options.get("launch_pdl", False),
        }
        ptx = made.asm["ptx"]
        found |= {"products": ptx.count("wgmma.mma_async"), "order": order(ptx)}
        print(json.dumps(found))


def order(ptx):
    """What comes when: the first copies of rows (16 bytes) and of numbers (4), the first store, waiting, letting the
    next begin, and the call of what adds up parts."""
    entry = ptx[ptx.index(".entry") :]
    entry = entry[: entry.index("\n}\n")]
    marks = {
        "rows": "cp.async.cg", "numbers": "cp.async.ca", "store": "st.global", "wait": "griddepcontrol.wait",
        "let": "griddepcontrol.launch_dependents", "add": "call.uni",
    }  # fmt: skip
    at = {name: entry.find(mark) for name, mark in marks.items()}
    return [name for name in sorted(at, key=at.__getitem__) if at[name] >= 0]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("at", range(len(CASES)), ids=["-".join(map(repr, case)) for case in CASES])
def test_it_compiles_and_as_many_programs_fit_as_are_counted_on(told, at):
    assert told[at]["kernel"] == CASES[at][0]
    assert told[at]["every_pair"] == (at == 2) and told[at]["segments"] == 1 + (at == 1)
    assert told[at]["bytes"] > 1000 and told[at]["products"] > 0
    assert 0 < told[at]["shared"] <= SHARED


def test_what_may_begin_early_waits_before_it_reads_what_the_kernel_before_makes(told):
    assert [x["early"] for x in told] == [False, False, False, True, True, True]
    assert all({"wait", "let"}.isdisjoint(x["order"]) for x in told[:3])
    dq, parts, rest = (x["order"] for x in told[3:])
    assert dq[:2] == ["wait", "let"]  # what comes before may have made any of its tensors
    # dq comes before: it has waited for q, k, v and do, and makes lse and delta; then all may begin
    assert parts == ["rows", "wait", "numbers", "let", "store"]
    # what comes before has waited for dq: it begins at once, and adds up parts when that is through
    assert rest == ["rows", "numbers", "let", "store", "wait", "add"]


def test_the_fused_kernels_compile_for_contexts_of_any_length(tmp_path):
    """Also where queries and keys are padded to different sizes, forward and backward."""
    program = Path(__file__).parents[2] / "helpers" / "kernel_fingerprints.py"
    done = subprocess.run(
        [sys.executable, program, tmp_path / "out.json", "fused context"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found) == 8 and not [x for x in found.items() if x[1].startswith("failed")]


@pytest.mark.parametrize(
    ("pattern", "launches"),
    [
        (SPARSE, ["parts", "adds"]),
        (every(64), ["parts", "sum_kernel"]),  # nobody comes next
        (causal() & window(128), ["whole"]),
    ],
    ids=repr,
)
def test_parts_come_first_and_the_next_launch_adds_them_up(monkeypatch, pattern, launches):
    from regard.engine.cuda.hopper import launches as hopper

    for name in ("is_hopper", "programs_at_a_time"):  # put back what launches_of replaces
        monkeypatch.setattr(hopper, name, getattr(hopper, name))
    made, _ = launches_of("hopper_dkv", pattern, 64)
    kinds = {(True, False): "parts", (False, True): "adds", (False, False): "whole"}
    assert launches == [
        kinds.get((x.sizes.get("SPLIT"), x.sizes.get("ADDS")), x.kernel.__name__) for x in made
    ]
    if (
        "adds" in launches
    ):  # for each of two heads of 8192 keys, 128 in two tiles that every query may attend to
        numbers = dict(zip(made[1].kernel.arg_names[12:], made[1].numbers))
        assert [numbers[x] for x in ("joins", "of_heads", "m", "all_heads", "n")] == [2, 2, 8192, 1, 16384]
        assert made[1].sizes["adds"] is None


if __name__ == "__main__":
    main()
