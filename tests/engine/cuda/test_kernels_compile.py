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
    ("stream_kernel", SPARSE, 64),
    ("stream_kernel", window(128) | every(64), 128),  # blocks of two progressions
    ("stream_kernel", window(40) - dilated(3, 5), 64),  # not two bounds: every pair is tested
    ("dq_stream", SPARSE, 64),
    ("dkv_stream", SPARSE, 64),  # the keys that all see, in parts
    ("dkv_stream", SPARSE, 128, 1),  # the others, and then the parts are added up
]
GIVEN = {  # what comes before the tables: h 16 bits, f 32
    "stream_kernel": "hhhhf",  # q k v o lse
    "dq_stream": "hhhhhffffh",  # q k v o do lse dlse lse2 delta dq
    "dkv_stream": "hhhhffhhf",  # q k v do lse2 delta dk dv part
}
SHARED = 227 * 1024  # bytes of a multiprocessor


def launch_of(which, pattern, d, nth=0, n=8192):
    """What would be launched, and the configuration it is made for."""
    from regard.engine.cuda.configs import default
    from regard.engine.cuda.hopper import launches as streams
    from regard.engine.cuda.host import Task
    from regard.engine.cuda.prepared import Launch, dense
    from regard.engine.cuda.schedule import route

    made = []
    streams.Launch = lambda *a, **k: made.append(Launch(*a, **k)) or made[-1]
    streams.at_a_time = lambda config, device: 8
    cpu, kind, lie = torch.device("cpu"), torch.bfloat16, dense(1, 2, n, d)
    configs = default(d, d, kind)
    task = Task(pattern, 0, 1, d**-0.5, configs)
    config = {
        "stream_kernel": configs.stream, "dq_stream": configs.stream_dq, "dkv_stream": configs.stream_dkv
    }[which]  # fmt: skip
    by_keys, forward = which == "dkv_stream", which == "stream_kernel"
    way = route(pattern, n, n, 0, 1, config, by_keys, cpu)
    if forward:
        streams.forward_stream(task, way, lie, lie, lie, kind, cpu)
    elif by_keys:
        streams.dkv_call(task, way, (lie,) * 5, kind, cpu)
    else:
        streams.dq_call(task, way, (lie,) * 5, kind, cpu, False)
    return made[nth], config


def compiled(launch):
    """The kernel as Triton specialises it at its first launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    names, left = launch.kernel.arg_names, {p.name for p in launch.kernel.params if p.do_not_specialize}
    kinds = {"h": "*bf16", "f": "*fp32"}
    given = [kinds[x] for x in GIVEN[launch.kernel.__name__]] + ["*i32"] * len(launch.tables)
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
    from regard.engine.cuda.hopper.launches import side_by_side

    for case in CASES:
        launch, config = launch_of(*case)
        made = compiled(launch)
        found = {
            "kernel": launch.kernel.__name__,
            "every_pair": launch.sizes["allowed"] is not None,
            "segments": launch.sizes["SEGMENTS"],
            "shared": made.metadata.shared * side_by_side(config),
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
def test_parts_come_first_and_who_comes_next_adds_them_up(monkeypatch, pattern, launches):
    from regard.engine.cuda.hopper import launches as streams

    monkeypatch.setattr(streams, "Launch", streams.Launch)  # put back what launch_of puts in their place
    monkeypatch.setattr(streams, "at_a_time", streams.at_a_time)
    made = [launch_of("dkv_stream", pattern, 64, nth)[0] for nth in range(len(launches))]
    with pytest.raises(IndexError):
        launch_of("dkv_stream", pattern, 64, len(launches))
    kinds = {(True, False): "parts", (False, True): "adds", (False, False): "whole"}
    assert launches == [
        kinds.get((x.sizes.get("SPLIT"), x.sizes.get("ADDS")), x.kernel.__name__) for x in made
    ]
    if "adds" in launches:  # of each of two heads of 8192 keys, 128 in two tiles that all see
        numbers = dict(zip(made[1].kernel.arg_names[12:], made[1].numbers))
        assert [numbers[x] for x in ("joins", "of_heads", "m", "all_heads", "n")] == [2, 2, 8192, 1, 16384]
        assert made[1].tables[2].shape == (2, 8) and made[1].sizes["adds"] is None


if __name__ == "__main__":
    main()
