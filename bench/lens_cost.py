"""What does rg.look cost? Memory and time of its statistics against eager attention with weights; its cost when idle.

memory: the rise of the peak above q, k and v (Linux), n = 16384, 12 heads of 64, one layer, in a separate process;
for eager attention the table itself, 12 n² float32 (its true peak is higher). time: a forward pass of BERT (2 layers,
width 768, 12 heads, n = 4096), `look(keep=False)` on the sdpa model against output_attentions=True on the eager one,
interleaved medians. idle: the sdpa model before the first look of the process and after it.

PYTHONPATH=src python bench/lens_cost.py --write      (about three minutes on two cores)
"""

import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch

HEADS, WIDTH = 12, 64


def memory(n: int) -> dict:
    """Run in a child: the peak of this process before and after the statistics."""
    result = subprocess.run(
        [sys.executable, __file__, "--child", str(n)], capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def child(n: int) -> None:
    from regard.lens.view import look

    torch.set_num_threads(2)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        attend(q, k, v)  # the model's own forward pass, and the libraries' first use
        look(lambda q: attend(q, q, q), q[:, :, :64]).rows()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = _kilobytes("VmRSS"), time.perf_counter()
    look(lambda q: torch.nn.functional.scaled_dot_product_attention(q, k, v), q, keep=False).rows()
    rise, eager = (_kilobytes("VmHWM") - before) * 1024, HEADS * n * n * 4
    result = {"n": n, "rise_mb": rise / 1e6, "eager_mb": eager / 1e6, "share": rise / eager}
    print(json.dumps(result | {"seconds": time.perf_counter() - start}))


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def bert(implementation: str, n: int):
    import transformers as tf

    torch.manual_seed(0)
    config = tf.BertConfig(num_hidden_layers=2, max_position_embeddings=n)
    return tf.BertModel._from_config(config, attn_implementation=implementation).eval()


def timed(n: int, rounds: int) -> dict:
    from regard.lens.view import look

    fused, eager = bert("sdpa", n), bert("eager", n)
    given = {
        "input_ids": torch.randint(1000, 30000, (1, n)),
        "attention_mask": torch.ones(1, n, dtype=torch.long),
    }
    variants = {
        "forward, sdpa": lambda: fused(**given),
        "eager with weights": lambda: eager(**given, output_attentions=True).attentions,
        "look, every head": lambda: look(fused, given, keep=False).statistics,
        "look, maps kept": lambda: look(fused, given),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    with torch.no_grad():
        for turn in range(rounds + 1):
            for name, run in variants.items():
                start = time.perf_counter()
                run()
                if turn:
                    times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(each) for name, each in times.items()}
    spread = {name: [min(each), max(each)] for name, each in times.items()}
    ratio = medians["look, every head"] / medians["eager with weights"]
    return {"n": n, "medians_s": medians, "range_s": spread, "look_over_eager": ratio}


def idle(n: int, rounds: int) -> dict:
    """The same forward pass before the first look of the process and after it."""
    model = bert("sdpa", n)
    given = {"input_ids": torch.randint(1000, 30000, (1, n))}

    def seconds() -> list[float]:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            model(**given)
            times.append(time.perf_counter() - start)
        return times

    with torch.no_grad():
        seconds()
        from regard.lens.view import look

        before = seconds()
        look(model, given).rows()
        after = seconds()
    return {
        "n": n,
        "before_s": statistics.median(before),
        "after_s": statistics.median(after),
        "ratio_of_medians": statistics.median(after) / statistics.median(before),
        "ratio_of_minima": min(after) / min(before),
    }


def main() -> None:
    if "--child" in sys.argv:
        return child(int(sys.argv[-1]))
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    quick = "--quick" in sys.argv
    result = {
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, 2 threads",
        "idle": idle(128, 10 if quick else 60),
        "memory": memory(4096 if quick else 16384),
        "time": timed(1024 if quick else 4096, 1 if quick else 5),
    }
    print(json.dumps(result, indent=1))
    if "--write" in sys.argv:
        path = Path(__file__).parent / "results" / f"lens-cost-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}", file=sys.stderr)
    return None


if __name__ == "__main__":
    main()
