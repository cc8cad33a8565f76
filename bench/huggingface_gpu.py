"""A training step of a Llama-shaped model on a GPU: "regard" against "sdpa" and "flex_attention" in the same model.

Random weights, bfloat16, one sequence, forward and backward of the language-model loss. Sparse: `causal() &
(window(512) | sinks(4))` by regard, by flex_attention with the pattern's BlockMask, and by sdpa over all past keys
(its usual use; with --table also with the same mask as a table). Dense: causal, by regard and by sdpa. Parity is
asserted first, at a smaller length. Runs alternate; medians and the spread are printed.

    python bench/huggingface_gpu.py --n 32768 --dense 8192
"""

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

import regard as rg

warnings.simplefilter("ignore")
import regard.interop.huggingface  # noqa: E402

PATTERN = rg.causal() & (rg.window(512) | rg.sinks(4))


def build(device: torch.device, layers: int, small: bool, n: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=256 if small else 2048, intermediate_size=512 if small else 8192,
        num_hidden_layers=layers, num_attention_heads=4 if small else 32, num_key_value_heads=2 if small else 8,
        max_position_embeddings=n, use_cache=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).train()


class Case:
    """One implementation: how the model is set, and what else its forward gets."""

    def __init__(self, model: Any, name: str, n: int):
        self.model, self.name, self.given, self.applied = model, name, {}, None
        device = model.device
        if name == "flex, pattern":
            self.given["attention_mask"] = PATTERN.block_mask(n, device=device)
        elif name == "sdpa, table":
            self.given["attention_mask"] = PATTERN.allowed(n, device=device)[None, None]

    def step(self, ids: Any) -> float:
        model = self.model
        model.set_attn_implementation({"s": "sdpa", "r": "regard", "f": "flex_attention"}[self.name[0]])
        applied = rg.use(model, PATTERN) if self.name == "regard, pattern" else None
        hidden = model.model(ids, **self.given).last_hidden_state
        loss = hidden.new_zeros((), dtype=torch.float32)
        for part in range(0, ids.shape[1] - 1, 4096):  # the logits of a part at a time: the same work for all
            logits = model.lm_head(hidden[:, part : part + 4096]).float()
            labels = ids[0, part + 1 : part + 4097]
            loss = loss + torch.nn.functional.cross_entropy(logits[0, : len(labels)], labels, reduction="sum")
        (loss / ids.shape[1]).backward()
        if applied is not None:
            applied.remove()
        return float(loss.detach()) / ids.shape[1]

    def timed(self, ids: Any) -> float:
        self.model.zero_grad(set_to_none=True)
        synchronize(ids.device)
        began = time.perf_counter()
        self.step(ids)
        synchronize(ids.device)
        return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def compare(model: Any, names: list[str], n: int, repeats: int, baseline: str) -> None:
    ids = torch.randint(0, 32000, (1, n), device=model.device)
    cases, times = {name: Case(model, name, n) for name in names}, {name: [] for name in names}
    for name in names:
        cases[name].timed(ids)
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            cases[name].timed(ids)
            print(f"{name}: peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    for turn in range(repeats):
        for name in names if turn % 2 else names[::-1]:
            times[name].append(cases[name].timed(ids))
    middle = {name: statistics.median(t) for name, t in times.items()}
    print(f"\n| n | case | step s | min … max | {baseline} / this |\n|--:|---|--:|---|--:|")
    for name in names:
        spread = f"{min(times[name]):.4f} … {max(times[name]):.4f}"
        ratio = middle[baseline] / middle[name]
        print(f"| {n} | {name} | {middle[name]:.4f} | {spread} | {ratio:.3f} |", flush=True)


def kernel_times(model: Any, name: str, n: int) -> list[tuple[str, float, int]]:
    """(kernel, milliseconds, launches) of one training step, longest first."""
    from torch.profiler import ProfilerActivity, profile

    ids = torch.randint(0, 32000, (1, n), device=model.device)
    case = Case(model, name, n)
    case.timed(ids)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        case.timed(ids)
    rows = [(e.key, e.self_device_time_total / 1000, e.count) for e in found.key_averages()]
    return sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])


def saved_bytes(model: Any, name: str, n: int) -> dict[str, float]:
    """MiB of the storages that autograd saves in one forward, by shape and dtype; each storage once."""
    case, seen, sizes = Case(model, name, n), set(model_storages(model)), {}
    ids = torch.randint(0, 32000, (1, n), device=model.device)

    def pack(x: Any) -> Any:
        storage = x.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            key = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            sizes[key] = sizes.get(key, 0.0) + storage.nbytes() / 2**20
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        case.step(ids)
    model.zero_grad(set_to_none=True)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def model_storages(model: Any) -> list[int]:
    return [x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())]


def profiled(model: Any, names: list[str], n: int, out: Path | None) -> None:
    """Where a step of each case goes: kernels by time, and what is saved for the backward pass."""
    made = {}
    for name in names:
        rows = kernel_times(model, name, n)
        made[name] = {"kernels": rows, "saved": saved_bytes(model, name, n)}
        print(f"\n{name}: {sum(row[1] for row in rows):.1f} ms of kernels", flush=True)
        for kernel, ms, count in rows[:16]:
            print(f"  {ms:8.2f} ms {count:5d} × {kernel[:90]}")
        print(
            f"  saved {sum(made[name]['saved'].values()) / 1024:.2f} GiB:",
            list(made[name]["saved"].items())[:12],
        )
        if out is not None:
            out.write_text(json.dumps(made))


def assert_parity(model: Any, names: list[str]) -> None:
    ids = torch.randint(0, 32000, (1, 1536), device=model.device)
    found = {name: Case(model, name, 1536).step(ids) for name in (*names, "sdpa, table")}
    for name in names:
        other = "sdpa" if name == "regard" else "sdpa, table"
        if name in ("regard", "regard, pattern", "flex, pattern"):
            assert abs(found[name] - found[other]) < 2e-3 * abs(found[other]), (name, found)
    print("losses agree:", {name: round(x, 4) for name, x in found.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=32768)
    parser.add_argument("--dense", type=int, nargs="*", default=[8192])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-flex", action="store_true")
    parser.add_argument("--table", action="store_true", help="also sdpa with the pattern as an n × n table")
    parser.add_argument("--small", action="store_true", help="narrow layers, to try the script")
    parser.add_argument("--profile", action="store_true", help="kernels and saved tensors, no timing")
    parser.add_argument("--out", type=Path, help="where --profile writes its rows")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, {args.layers} layers",
        flush=True,
    )
    model = build(device, args.layers, args.small, args.n)
    if args.profile:
        profiled(model, ["regard, pattern", "flex, pattern", "sdpa"], args.n, args.out)
        return
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters", flush=True)
    sparse = ["sdpa", "regard, pattern", *([] if args.no_flex else ["flex, pattern"])]
    assert_parity(model, [*sparse, "regard"])
    for n in args.dense:
        compare(model, ["sdpa", "regard"], n, 2 * args.repeats, "sdpa")
    compare(model, [*sparse, *(["sdpa, table"] if args.table else [])], args.n, args.repeats, "sdpa")


if __name__ == "__main__":
    main()
