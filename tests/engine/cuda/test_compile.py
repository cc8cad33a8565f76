"""The kernels, compiled for a Hopper GPU where there is none: what they are given is what they take.

In a process of its own: the compiler complains about its own leaks when it ends.
"""

import importlib.util
import json
import os
import sys
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch

import new_process
from regard.engine.cuda.documents import _packed
from regard.pattern import blocks, causal, dilated, every, neighborhood, rows, sinks, strided, window

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

SPARSE = causal() & (window(128) | every(64))
CHAINED = causal() & (window(64) | dilated(64, 8) | dilated(64, 64))


def packed(*lengths, n=8192):
    """Causal documents of these lengths, one length for each batch row."""
    ids = torch.stack([torch.arange(n) // length for length in lengths])
    return _packed(ids, causal(), ids.numpy())


CASES = [
    ("hopper_forward", SPARSE, 64),
    ("hopper_forward", SPARSE, 80),  # scores over 80 of 128 columns
    ("hopper_dq", SPARSE, 64),
    ("hopper_dkv", SPARSE, 64),  # the keys that every query may attend to, in parts
    ("hopper_dkv", SPARSE, 64, 1),  # the other keys, and then the parts are added up
    ("hopper_forward", causal() & window(64), 40),  # a stride that is a multiple of 8 and not of 16
    ("hopper_forward", CHAINED, 64, 1),  # a pass that goes on from an earlier one, and a later one from it
]
OTHER_CASES = [  # in `make long`
    ("hopper_forward", window(128) | every(64), 128),  # blocks of two progressions
    ("hopper_dkv", SPARSE, 128, 1),
    ("hopper_forward", neighborhood((128, 64), (1, 9)), 128),  # tiles that are lines
    ("hopper_dkv", neighborhood((8, 32, 32), (3, 5, 5), border="shifted"), 64),  # tiles that are boxes
    ("hopper_dq", CHAINED, 128),  # passes in one launch
    ("hopper_dkv", CHAINED, 128),
    ("hopper_forward", neighborhood((128, 64), 7), 128),  # tiles that are boxes
    ("hopper_dq", neighborhood((128, 64), 7), 128),
    ("hopper_dkv", neighborhood((61, 53), 7), 128),  # boxes that share members
    ("hopper_forward", SPARSE, 256),  # one buffer for values, so that two programs have room
    ("hopper_dq", SPARSE, 256),  # two warpgroups
    ("hopper_dkv", SPARSE, 256, 1),
    ("hopper_forward", CHAINED, 128),
    ("hopper_forward", packed(100, 300), 128),
    ("hopper_dq", packed(100, 300), 128),
    ("hopper_dkv", packed(100, 300), 128),
    ("hopper_dq", SPARSE, 128),  # two programs have room, to the byte
    ("hopper_forward", packed(100, 300), 64),  # a table for each batch row
]
SHARED, RESERVED = 228 * 1024, 1024  # bytes of a multiprocessor; of them, reserved for each program


def launches_of(which, pattern, d, n=8192, softcap=None, **terms):
    """What would be launched, and the configuration it is prepared for."""
    from regard.engine.cuda import launches
    from regard.engine.cuda.call import CallLayout, Task, contiguous, default
    from regard.engine.cuda.hopper import launches as hopper

    launches.is_hopper, hopper.programs_at_a_time = (lambda device: True), (lambda config, device: 8)
    hopper.CACHE = 0  # forward passes are chained, although their rows would fit into a GPU's cache
    like, configs = contiguous(1, 2, n, d), default(d, d, torch.bfloat16)
    task = Task(pattern, 0, 1, d**-0.5, 0.0, softcap, configs)
    call = CallLayout(task, (like,) * 5, torch.bfloat16, torch.device("cpu"), **terms)
    if which == "hopper_forward":
        _, program = launches.forward(call._replace(tensors=(like,) * 3))
        return [launch for launch, *_ in program.launches], configs.hopper_forward
    if which == "hopper_dq":
        return [launch for launch, _ in hopper.dq(call)[1] if launch.grid[0]], configs.hopper_dq
    return [launch for launch, _ in hopper.dkv(call)[1]], configs.hopper_dkv


POINTERS = {  # of 16-bit numbers (h), float32 (f) and int32 (i)
    "hopper_forward": "hhhhfffifiiii",  # q k v o lse part_o part_lse lengths sink, chunks blocks slots masks
    "hopper_dq": "hhhhhffffhfiiiii",  # q k v o do lse dlse lse2 delta dq part lengths, chunks blocks slots masks
    "hopper_dkv": "hhhhffhhfiiiii",  # q k v do lse2 delta dk dv part lengths, chunks blocks slots masks
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
    """One line per case, as JSON."""
    from regard.engine.cuda.hopper.launches import programs_per_multiprocessor

    if sys.argv[1:] == ["terms"]:
        for which, terms in product(POINTERS, TERMS):
            made = compiled(launches_of(which, SPARSE, 64, **terms)[0][0])
            print(json.dumps({"kernel": which, "tanh": made.asm["ptx"].count("rcp.approx.ftz.f32 x")}))
        return
    others = len(sys.argv) > 1
    for which, pattern, d, *nth in OTHER_CASES if others else CASES:
        launches, config = launches_of(which, pattern, d, getattr(pattern, "size", 8192))
        launch = launches[nth[0] if nth else 0]
        made = compiled(launch)
        found = {
            "kernel": launch.kernel.__name__,
            "segments": int(launch.sizes["S"].SEGMENTS),
            "shared": (made.metadata.shared + RESERVED) * programs_per_multiprocessor(config),
            "bytes": len(made.asm["cubin"]),
            "early": launch.options.get("launch_pdl", False),
            "cooperative": launch.options.get("launch_cooperative_grid", False),
        }
        ptx = made.asm["ptx"]
        found |= {
            "products": ptx.count("wgmma.mma_async"),
            "order": order(ptx),
            "waits": "ld.acquire.gpu" in ptx,
            "writes_when_awaited": ptx.count("griddepcontrol.wait") >= 2  # within the loop, and after it
            and ptx.find("griddepcontrol.wait") < ptx.find("st.global"),
        }
        found["counts"], found["fenced"] = counts_after_a_barrier(ptx), copies_are_fenced(ptx)
        print(json.dumps(found))
    for name in OTHER_FUSED if others else FUSED:
        print(json.dumps({"fused": name, "launches": fused(name)}))


TERMS = {"softcap": 30.0}, {"lengths": 1}, {"lengths": 2, "softcap": 30.0, "has_sink": True}
FUSED = ("fused context of unequal length 33 x 100",)
OTHER_FUSED = (
    "fused context",
    "fused context of unequal length 20 x 60",
    "fused context of unequal length 60 x 20",
)


def fused(name):
    """The PTX sizes of the kernels of one call that reads a fused projection."""
    from triton.runtime.jit import JITFunction

    from kernel_fingerprints import fused, ptx_of

    made = []
    with mock.patch.object(JITFunction, "run", lambda self, *a, grid, warmup, **k: made.append((self, a, k))):
        dict(fused(torch))[name]()
    return {kernel.__name__: len(ptx_of(kernel, a, k)) for kernel, a, k in made}


def order(ptx):
    """The order of the first copies of rows (16 bytes) and of numbers (4), the first store, waiting, letting the next
    kernel start, and the call of what adds up parts."""
    entry = ptx[ptx.index(".entry") :]
    entry = entry[: entry.index("\n}\n")]
    marks = {
        "rows": "cp.async.cg", "numbers": "cp.async.ca", "store": "st.global", "wait": "griddepcontrol.wait",
        "let": "griddepcontrol.launch_dependents", "add": "call.uni",
    }  # fmt: skip
    at = {name: entry.find(mark) for name, mark in marks.items()}
    return [name for name in sorted(at, key=at.__getitem__) if at[name] >= 0]


def counts_after_a_barrier(ptx):
    """Whether a program counts tiles, each time with a barrier between its stores and that."""
    before = ptx.split("gpu.release.add")[:-1]
    return bool(before) and all(x.rfind("bar.sync") > x.rfind("st.global") for x in before)


def copies_are_fenced(ptx):
    """Whether a fence is between waiting for copies and the next product, which reads by another proxy."""
    waits = [x.split("cp.async.wait_group", 1)[0] for x in ptx.split("cp.async.wait_group")[1:]]
    before = [x.split("wgmma.mma_async", 1)[0] for x in waits if "wgmma.mma_async" in x]
    return bool(before) and all("fence.proxy.async" in x for x in before)


def run(tmp_path_factory, *arguments):
    """What a process of its own prints, line by line."""
    helpers = Path(__file__).parents[2] / "helpers"
    paths = os.pathsep.join([str(helpers), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": paths}
    done = new_process.run(Path(__file__), *arguments, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(tmp_path_factory)


@pytest.mark.long
def test_hopper_kernels_compile_with_softcap_lengths_and_sinks(tmp_path_factory):
    found = run(tmp_path_factory, "terms")
    assert [x["kernel"] for x in found] == [name for name in POINTERS for _ in TERMS]
    assert [x["tanh"] > 0 for x in found] == ["softcap" in terms for _ in POINTERS for terms in TERMS]


@pytest.fixture(scope="module")
def other_results(tmp_path_factory):
    return run(tmp_path_factory, "others")


def assert_compiled(result, name, segments=1):
    assert result["kernel"] == name
    assert result["segments"] == segments
    assert result["bytes"] > 1000 and result["products"] > 0 and result["fenced"]
    assert 0 < result["shared"] <= SHARED


@pytest.mark.parametrize("at", range(len(CASES)), ids=["-".join(map(repr, case)) for case in CASES])
def test_hopper_kernels_compile_and_as_many_programs_fit_as_the_work_is_split_for(results, at):
    assert_compiled(results[at], CASES[at][0])


def test_scores_are_computed_over_the_width_of_a_head(results):
    """The first block takes 8 products over 128 columns, every later one 5 over 80; and 4 each with values."""
    assert results[1]["products"] == 8 + 5 + 4 + 4


@pytest.mark.parametrize("which", ["hopper_forward", "hopper_dq", "hopper_dkv"])
def test_patterns_of_one_form_run_the_same_kernel(which):
    """Or else every new window, and every new batch of documents, would be compiled for seconds."""
    documents, long_ones = packed(3, n=2048), packed(2048, n=2048)
    wide, *others = (
        launches_of(which, pattern, 64, 2048)[0]
        for pattern in (
            window(100), causal() & window(31), causal() & blocks(100) - strided(7), documents, long_ones
        )
    )  # fmt: skip
    assert all(x[0].sizes == wide[0].sizes and x[0].options == wide[0].options for x in others)
    assert len(others[-2]) == len(others[-1]) == 1


@pytest.mark.parametrize("which", ["hopper_forward", "hopper_dq", "hopper_dkv"])
def test_documents_of_each_batch_row_are_one_more_kernel_and_no_more(which):
    one, two, others = (
        launches_of(which, pattern, 64, 2048)[0][0].sizes["S"]
        for pattern in (packed(3, n=2048), packed(3, 2048, n=2048), packed(64, 65, n=2048))
    )
    assert two == others and two._replace(BY_ROW=one.BY_ROW) == one and two != one


@pytest.mark.long
def test_hopper_kernels_compile_for_wide_heads_and_blocks_of_two_progressions(other_results):
    assert_compiled(other_results[0], "hopper_forward", segments=2)
    assert_compiled(other_results[1], "hopper_dkv")
    assert_compiled(other_results[16], "hopper_dq")


@pytest.mark.long
def test_hopper_kernels_compile_for_grids_in_lines_and_in_boxes(other_results):
    assert_compiled(other_results[2], "hopper_forward")
    for at, name in ((3, "hopper_dkv"), (6, "hopper_forward"), (7, "hopper_dq"), (8, "hopper_dkv")):
        assert_compiled(other_results[at], name, segments=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "name"), [(13, "hopper_forward"), (14, "hopper_dq"), (15, "hopper_dkv"), (17, "hopper_forward")]
)
def test_hopper_kernels_compile_for_documents_of_each_batch_row(other_results, at, name):
    assert_compiled(other_results[at], name)


@pytest.mark.long
@pytest.mark.parametrize(("at", "name"), [(9, "hopper_forward"), (10, "hopper_dq"), (11, "hopper_dkv")])
def test_hopper_kernels_compile_for_heads_of_256(other_results, at, name):
    assert_compiled(other_results[at], name)


@pytest.mark.long
@pytest.mark.parametrize(("at", "name"), [(4, "hopper_dq"), (5, "hopper_dkv"), (12, "hopper_forward")])
def test_passes_in_one_launch_wait_for_what_others_have_written_before_they_read_it(other_results, at, name):
    assert_compiled(other_results[at], name)
    assert other_results[at]["cooperative"] and not other_results[at]["early"]
    assert other_results[at]["waits"] and other_results[at]["counts"]


def test_a_kernel_that_starts_early_waits_before_it_reads_what_the_previous_kernel_computes(results):
    assert [x["early"] for x in results[:7]] == [False, False, True, True, True, False, True]
    assert results[6]["order"][0] == "let" and results[6]["writes_when_awaited"]
    assert all({"wait", "let"}.isdisjoint(x["order"]) for x in results[:2])
    dq, parts, rest = (x["order"] for x in results[2:5])
    assert dq[:2] == ["wait", "let"]  # the previous kernel may have computed any of its tensors
    # dq is the previous kernel: it has waited for q, k, v and do, and computes lse and delta; then all may start
    assert parts == ["rows", "wait", "numbers", "let", "store"]
    # the previous kernel has waited for dq: this one starts at once, and adds up parts when that one has ended
    assert rest == ["rows", "numbers", "let", "store", "wait", "add"]


def compiled_both_ways(results, names):
    sizes = {x["fused"]: x["launches"] for x in results if "fused" in x}
    kernels = {"forward_kernel", "backward_kernel"}
    return set(sizes) == set(names) and all(
        set(x) == kernels and min(x.values()) > 1000 for x in sizes.values()
    )


def test_the_fused_kernels_compile_where_queries_and_keys_are_padded_to_different_sizes(results):
    assert compiled_both_ways(results, FUSED)


@pytest.mark.long
def test_the_fused_kernels_compile_for_contexts_of_any_length(other_results):
    assert compiled_both_ways(other_results, OTHER_FUSED)


@pytest.mark.parametrize(
    ("pattern", "launches"),
    [
        (SPARSE, ["parts", "adds"]),
        (every(64), ["parts", "sum_kernel"]),  # there is no next launch
        (causal() & window(128), ["whole"]),
    ],
    ids=repr,
)
def test_parts_come_first_and_the_next_launch_adds_them_up(monkeypatch, pattern, launches):
    import triton.language as tl

    from regard.engine.cuda import launches as module
    from regard.engine.cuda.hopper import launches as hopper

    for of, name in (
        (module, "is_hopper"),
        (hopper, "programs_at_a_time"),
    ):  # put back what launches_of replaces
        monkeypatch.setattr(of, name, getattr(of, name))
    made, _ = launches_of("hopper_dkv", pattern, 64)
    kinds = {(True, False): "parts", (False, True): "adds", (False, False): "whole"}
    found = [x.sizes.get("S") for x in made]
    fields = [x for s in found if s is not None for x in s]  # Triton 3.6 takes no others
    assert fields and all(x is None or callable(x) or isinstance(x, tl.constexpr) for x in fields)
    assert launches == [
        x.kernel.__name__ if s is None else kinds[bool(s.SPLIT), bool(s.ADDS)] for x, s in zip(made, found)
    ]
    if (
        "adds" in launches
    ):  # for each of two heads of 8192 keys, 128 in two tiles that every query may attend to
        numbers = dict(zip(made[1].kernel.arg_names[len(POINTERS["hopper_dkv"]) :], made[1].numbers))
        assert [numbers[x] for x in ("joins", "of_heads", "m", "all_heads", "n")] == [2, 2, 8192, 1, 16384]
        assert made[1].sizes["S"].adds is None


@pytest.mark.parametrize(("programs", "share"), [(8, 0.1), (32, 0.0)])
def test_dk_and_dv_have_a_dynamic_share_only_where_programs_have_many_blocks(monkeypatch, programs, share):
    from regard.engine.cuda import launches
    from regard.engine.cuda.call import CallLayout, Task, contiguous, default
    from regard.engine.cuda.hopper import launches as hopper

    shares, split_work = [], hopper.split_work
    monkeypatch.setattr(launches, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "programs_at_a_time", lambda config, device: programs)
    monkeypatch.setattr(hopper, "split_work", lambda *given: (shares.append(given[5]), split_work(*given))[1])
    task = Task(causal() & window(64), 0, 1, 0.125, 0.0, None, default(64, 64, torch.bfloat16))
    call = CallLayout(task, (contiguous(1, 2, 8192, 64),) * 5, torch.bfloat16, torch.device("cpu"))
    hopper.dkv(call)
    assert shares == [share]  # 510 blocks: 64 or 16 a program


@pytest.mark.parametrize("d", [64, 128, 160, 256])
@pytest.mark.parametrize(
    ("pattern", "n", "passes", "sums"),
    [
        # Of each pass, whether its tiles are split and go on from an earlier one. Here each writes the keys that the
        # other leaves out, and the second adds up the parts of the first.
        (SPARSE, 2048, [(True, False), (False, False)], []),
        (SPARSE, 4096, [(True, False), (False, False)], []),
        (causal() & (window(64) | every(50) | sinks(100)), 2048, [(False, False), (True, True)], [True]),
    ],
    ids=repr,
)
def test_the_kernels_for_hopper_run_every_pass_of_shorter_sequences(monkeypatch, pattern, n, passes, sums, d):
    from regard.engine.cuda import launches
    from regard.engine.cuda.call import CallLayout, Task, contiguous, default
    from regard.engine.cuda.hopper import launches as hopper

    monkeypatch.setattr(launches, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "programs_at_a_time", lambda config, device: 64)
    like, configs = contiguous(1, 16, n, d), default(d, d, torch.bfloat16)
    task = Task(pattern, 0, 1, d**-0.5, 0.0, None, configs)
    call = CallLayout(task, (like,) * 5, torch.bfloat16, torch.device("cpu"))
    _, program = launches.backward(call)
    names = {launch.kernel.__name__ for launch, *_ in program.launches}
    assert {"hopper_dq", "hopper_dkv"} <= names <= {"hopper_dq", "hopper_dkv", "sum_kernel"}
    steps = hopper.hopper_passes(call, configs.hopper_dkv, True).steps
    assert [(step.work.split, step.accumulates) for step in steps] == passes
    added = [x.sizes["ACCUMULATES"] for x, *_ in program.launches if x.kernel.__name__ == "sum_kernel"]
    assert added == sums


def test_the_general_kernels_run_what_those_for_hopper_cannot(monkeypatch):
    from dataclasses import replace

    from regard.engine.cuda import launches
    from regard.engine.cuda.call import CallLayout, Layout, Task, contiguous, default

    monkeypatch.setattr(launches, "is_hopper", lambda device: True)
    like, configs = contiguous(1, 2, 256, 64), default(64, 64, torch.bfloat16)
    task = Task(SPARSE, 0, 1, 0.125, 0.0, None, configs)
    call = CallLayout(task, (like,) * 5, torch.bfloat16, torch.device("cpu"))
    assert launches.takes_hopper(call) and not launches.takes_hopper(call._replace(dtype=torch.float32))
    forward_only = replace(task, configs=replace(configs, hopper_dq=None, hopper_dkv=None))
    assert launches.hopper_backward(call._replace(task=forward_only)) is None
    # Heads that share memory; o has the heads of a position together, so its rows are 16 times as far apart.
    wide = Layout((1, 16, 1 << 20, 128), (0, 0, 128, 1), True)
    inputs = call._replace(task=Task(SPARSE, 0, 1, 0.1, 0.0, None, default(128, 128, torch.bfloat16)))
    assert not launches.takes_hopper(inputs._replace(tensors=(wide,) * 3))
    assert launches.takes_hopper(inputs._replace(tensors=(wide._replace(shape=(1, 8, 1 << 20, 128)),) * 3))


@pytest.mark.parametrize(("dropout_p", "threshold"), [(0.0, 0), (0.25, 1 << 30), (1 - 2**-40, (1 << 32) - 1)])
def test_the_threshold_of_dropout_has_32_bits_however_near_to_one_the_probability_is(dropout_p, threshold):
    from regard.engine.cuda.call import CallLayout, Task, contiguous, default
    from regard.engine.cuda.launches import score_factors

    task = Task(SPARSE, 0, 1, 0.125, dropout_p, None, default(64, 64, torch.bfloat16))
    layouts = (contiguous(1, 2, 256, 64),) * 3
    assert score_factors(CallLayout(task, layouts, torch.bfloat16, torch.device("cpu")))[3] == threshold


@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize(
    ("pattern", "zeros"),
    [
        (SPARSE, {}),
        (CHAINED, {True}),  # tiles of several passes count in it
        (rows(64), {True, False}),  # most rows have no tile
    ],
    ids=repr,
)
def test_counters_and_what_no_tile_writes_begin_with_zeros(monkeypatch, pattern, zeros, on_hopper):
    from regard.engine.cuda import launches
    from regard.engine.cuda.call import CallLayout, Task, contiguous, default
    from regard.engine.cuda.hopper import launches as hopper

    monkeypatch.setattr(launches, "is_hopper", lambda device: on_hopper)
    monkeypatch.setattr(hopper, "programs_at_a_time", lambda config, device: 8)
    task = Task(pattern, 0, 1, 0.125, 0.0, None, default(64, 64, torch.bfloat16))
    like = contiguous(1, 2, 8192, 64)
    _, program = launches.backward(CallLayout(task, (like,) * 5, torch.bfloat16, torch.device("cpu")))
    assert program.make is (torch.zeros if on_hopper in zeros else torch.empty)


@pytest.mark.parametrize(
    ("pattern", "has_sink", "delta"),
    [
        (SPARSE, True, "output"),
        (SPARSE, False, "workspace"),
        (rows(64), True, "workspace"),
    ],  # some rows have none
    ids=repr,
)
def test_delta_is_an_output_where_the_gradient_of_a_sink_reads_it(monkeypatch, pattern, has_sink, delta):
    from regard.engine.cuda import launches
    from regard.engine.cuda.call import CallLayout, Task, contiguous, default
    from regard.engine.cuda.hopper import launches as hopper

    monkeypatch.setattr(launches, "is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "programs_at_a_time", lambda config, device: 8)
    task = Task(pattern, 0, 1, 0.125, 0.0, None, default(64, 64, torch.bfloat16))
    layouts, device = (contiguous(1, 2, 4096, 64),) * 5, torch.device("cpu")
    call = CallLayout(task, layouts, torch.bfloat16, device, has_sink=has_sink)
    outputs, program = launches.hopper_backward(call)
    made = outputs((torch.empty(1, 2, 4096, 64, dtype=torch.bfloat16),) * 3)
    of_call = ["input"] * 6 + ["sink"] * has_sink + ["gradient"] * 3 + ["output"] * (len(made) - 3)
    names = [*of_call, "seed", *["workspace"] * len(program.pieces)]
    given = [dict(zip(launch.kernel.arg_names, pick(names))) for launch, pick, _ in program.launches]
    assert {x["DELTA"] for x in given if "DELTA" in x} == {delta}  # of dq and of dk and dv


@pytest.mark.parametrize(("order", "copies"), [("b n h d", 0), ("b h n d", 1)])
def test_o_has_the_strides_of_q_so_a_model_with_heads_within_positions_copies_nothing(order, copies):
    from einops import rearrange
    from triton.runtime.jit import JITFunction

    from regard.engine.call import Options
    from regard.engine.cuda import host
    from regard.engine.cuda.call import task

    shape = {"b": 2, "h": 4, "n": 96, "d": 32}
    rows = torch.zeros([shape[x] for x in order.split()], dtype=torch.bfloat16)
    q = rearrange(rows, f"{order} -> b h n d")
    made = []
    with mock.patch.object(JITFunction, "run", lambda self, *a, grid, warmup, **k: made.append((self, a))):
        o, _ = host.forward(q, q, q, task(q, q, Options(causal() & window(8), 0, 1, 1.0)))
    ((kernel, given),) = made
    given = dict(zip(kernel.arg_names, given))
    assert o.stride() == q.stride() == (*(given[x] for x in ("o_b", "o_h", "o_n")), 1)
    joined = rearrange(o, "b h n d -> b n (h d)")
    assert (joined.data_ptr() != o.data_ptr()) == copies


if __name__ == "__main__":
    main()
