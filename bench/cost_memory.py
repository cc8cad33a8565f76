"""Predicted against measured memory: training steps and generation of generated models on the CPU.

`PYTHONPATH=src:bench python3 bench/cost_memory.py --seed 25 --count 40 [--json OUT]` predicts and measures each; the
profiler reports every allocation and release of the CPU allocator, including temporaries inside kernels. For a model
that decodes with a cache, the forward pass, the prompt and the next token are compared as well.
"""

import argparse
import json
import statistics
from bisect import bisect_right
from pathlib import Path

import torch
from cost_models import built, cases, described, emptied, predicted, stepping
from origin import origin

from regard.costs.memory.runs import prompt


def counted(first, *calls) -> tuple[list[int], list[object]]:
    """Peaks of the bytes that the allocator added since before `first`, in each of the calls after it; their results.

    The engine's caches are emptied before: the tables and buffers that it then keeps count.
    """
    emptied()
    activity, results = torch.profiler.ProfilerActivity.CPU, []
    with torch.profiler.profile(activities=[activity], profile_memory=True) as profile:
        first()
        for call in calls:
            with torch.profiler.record_function("measured"):
                results.append(call())
    events = profile.profiler.kineto_results.events()
    begins = sorted(e.start_ns() for e in events if e.name() == "measured")
    now, peaks = 0, [0] * (len(begins) + 1)
    for at, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        now += size
        call = bisect_right(begins, at)
        peaks[call] = max(peaks[call], now)
    return peaks[1:], results


def total(tensors) -> int:
    unique = {x.untyped_storage().data_ptr(): x for x in tensors}
    return sum(x.numel() * x.element_size() for x in unique.values())


def measured(case) -> int:
    step, _, there = stepping(case, "cpu")
    return total(there) + counted(step, step)[0][0]


def measured_generation(case) -> dict[str, int]:
    """Peaks of a forward pass without gradients, of a prompt of n − 1 tokens, and of the next token."""
    model, args, kwargs, _ = built(case, "cpu")
    model.eval()
    labels = kwargs.pop("labels", None)
    if labels is not None and model.config.is_encoder_decoder:
        kwargs["decoder_input_ids"] = labels
    there, then = total([*model.parameters(), *model.buffers(), *args, *kwargs.values()]), []
    with torch.no_grad():
        (inference,), _ = counted(lambda: model(*args, **kwargs), lambda: model(*args, **kwargs))
        first, prefill = (
            lambda: prompt(model, args, kwargs)(),
            lambda: then.append(prompt(model, args, kwargs)),
        )
        (of_prompt, of_token), _ = counted(first, prefill, lambda: then[0]())
    return {"inference": there + inference, "prefill": there + of_prompt, "decode": there + of_token}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, errors, generated = [], [], []
    for case in cases(options.seed, options.count, 1):
        memory, real = predicted(case, "cpu").memory, measured(case)
        errors.append(memory.training_peak / real - 1)
        rows.append({"model": described(case), "predicted": memory.training_peak, "measured": real})
        moment = f"{memory.peak_part}, {memory.peak.operation}"
        if memory.prefill_peak is not None:
            peaks = (memory.inference_peak, memory.prefill_peak, memory.decode_peak)
            for (kind, size), guess in zip(measured_generation(case).items(), peaks):
                rows[-1] |= {f"{kind}_predicted": guess, f"{kind}_measured": size}
                generated.append(guess / size - 1)
                print(f"   {generated[-1]:+8.3%}  {guess:>12,}  {size:>12,}  {kind}", flush=True)
        print(
            f"{errors[-1]:+8.3%}  {memory.training_peak:>12,}  {real:>12,}  {described(case)}  [{moment}]",
            flush=True,
        )
    sizes = sorted(map(abs, errors))
    print(f"{len(rows)} models: median {statistics.median(sizes):.3%}, worst {sizes[-1]:.3%}, "
          f"{sum(e > 0.03 for e in sizes)} beyond 3 %")  # fmt: skip
    sizes = sorted(map(abs, generated))
    print(f"inference, prompt and next token, {len(sizes)} peaks: median {statistics.median(sizes):.3%}, "
          f"worst {sizes[-1]:.3%}, {sum(e > 0.03 for e in sizes)} beyond 3 %")  # fmt: skip
    if options.json:
        head = {**origin(), "seed": options.seed, "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps({**head, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
