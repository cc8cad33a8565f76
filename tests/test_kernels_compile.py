"""The streaming kernels, compiled for a Hopper GPU where there is none: what they are given is what they take.

In a process of its own: the compiler complains about its own leaks when it ends.
"""

import importlib.util
import json
import os
import subprocess
import sys

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
    ("dkv_stream", SPARSE, 64),
]
GIVEN = {  # what comes before the tables: h 16 bits, f 32
    "stream_kernel": "hhhhf",  # q k v o lse
    "dq_stream": "hhhhhffffh",  # q k v o do lse dlse lse2 delta dq
    "dkv_stream": "hhhhffhhf",  # q k v do lse2 delta dk dv part
}
SHARED = 227 * 1024  # bytes of a multiprocessor


def launch_of(which, pattern, d, n=1024):
    """What would be launched first, and the configuration it is made for."""
    from regard.engine.kernels import streams
    from regard.engine.kernels.configs import default
    from regard.engine.kernels.launch import Task
    from regard.engine.kernels.launches import Launch, dense
    from regard.engine.kernels.route import route

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
    return made[0], config


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
    from regard.engine.kernels.streams import side_by_side

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
        touched = min(ptx.index("cp.async"), ptx.index("st.global"))
        found |= {"products": ptx.count("wgmma.mma_async"), "awaits": "griddepcontrol.wait" in ptx[:touched]}
        print(json.dumps(found))


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("at", range(len(CASES)), ids=[f"{which}-{p!r}-{d}" for which, p, d in CASES])
def test_it_compiles_and_as_many_programs_fit_as_are_counted_on(told, at):
    assert told[at]["kernel"] == CASES[at][0]
    assert told[at]["every_pair"] == (at == 2) and told[at]["segments"] == 1 + (at == 1)
    assert told[at]["bytes"] > 1000 and told[at]["products"] > 0
    assert 0 < told[at]["shared"] <= SHARED


def test_what_may_begin_early_waits_before_it_touches_anything_and_only_that(told):
    assert [x["early"] for x in told] == [x["awaits"] for x in told] == [False, False, False, True, True]


if __name__ == "__main__":
    main()
