"""Hostile requests to `regard serve`, on this machine only: statuses, times, memory, and load times of the page.

    python bench/serve_hostile.py --seed 1 --clients 24 --minutes 2 --rows rows.jsonl  # a piece; each its own seed
    python bench/serve_hostile.py --rows rows.jsonl --sum bench/results/serve_hostile.json

A seeded generator makes bodies that are nearly valid (random values instead of fields, deep nesting, huge numbers,
long texts, broken JSON, random bytes) and sends them while another process loads the page every 50 ms. With --crowd,
200 clients then send 50 valid requests each, and every answer is compared with the library's result.
With --load, processes in other sessions compute at the same time.
"""

import argparse
import collections
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from origin import origin

import regard as rg

WORDS = {  # and the number of arguments
    "causal": 0, "full": 0, "window": 1, "every": 1, "strided": 1, "dilated": 2, "blocks": 1, "sinks": 1, "rows": 1,
}  # fmt: skip
DECLARATIONS = [json.loads(rg.preset(name).json()) for name in ("tiny-gpt", "tiny", "tiny-vit")]


def junk(rng: random.Random, depth: int = 0):
    """A random JSON value."""
    scalars = (
        None,
        True,
        -1,
        0,
        3,
        10**9,
        10**40,
        -(10**400),
        0.5,
        1e308,
        "",
        "inf",
        "²",
        "x" * 2000,
        "\ud800",
        "{{js}}",
    )
    kind = rng.random()
    if depth > 3 or kind < 0.7:
        return rng.choice(scalars)
    if kind < 0.85:
        return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(("kind", "n", "layers", "")): junk(rng, depth + 1) for _ in range(rng.randrange(4))}


def pattern(rng: random.Random, depth: int = 0) -> str:
    """The text of a pattern that is right more often than not."""
    if depth > rng.randrange(4):
        numbers = (1, 2, 7, 64, 65, 1000, 1001, 10**9, 250000001)
        if rng.random() < 0.02:
            numbers = (0, -3, 10**30, 0.5)
        word = "widow" if rng.random() < 0.01 else rng.choice(list(WORDS))
        return f"{word}({', '.join(str(rng.choice(numbers)) for _ in range(WORDS.get(word, 1)))})"
    if rng.random() < 0.2:
        return "~" * rng.choice((1, 2, 2, 2, 300)) + pattern(rng, depth + 1)
    return f"({pattern(rng, depth + 1)} {rng.choice('&|-&|-&|-+')} {pattern(rng, depth + 1)})"


def mutate(rng: random.Random, value: object) -> object:
    """A declaration with one part replaced by junk."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return {**value, key: mutate(rng, value[key])}
    return junk(rng)


def nested(rng: random.Random) -> dict:
    inner: object = {"kind": "causal"}
    for _ in range(rng.choice((3, 99, 900, 5000))):
        inner = {"kind": "Not", "inner": inner}
    return {"kind": "Attention", "d_model": 8, "heads": 2, "pattern": inner}


def body(rng: random.Random) -> tuple[str, bytes]:
    """A path and what is sent to it."""
    kind = rng.randrange(10)
    if kind == 0:
        raw = rng.choice((b"", b"null", b"[]", b"[" * 5000, b'{"n":' * 3000, rng.randbytes(200), b"1" * 6000))
        return rng.choice(("/api/pattern", "/api/cost", "/api/look", "/api", "/x")), raw
    if kind == 1:
        return "/api/pattern", b'{"pattern": "' + b"a" * rng.choice((600, 10**6, 3 * 10**6)) + b'"}'
    if kind <= 4:
        n = rng.choice((1, 16, 1000, 20000, 131072, 10**6, 10**9)) if rng.random() < 0.9 else junk(rng)
        given = {
            "pattern": pattern(rng),
            "n": n,
            "device": rng.choice(("cpu", "cuda")),
            "train": junk(rng) if rng.random() < 0.05 else True,
        }
        path = "/api/pattern"
    elif kind >= 8:
        path, given = studio(rng)
    elif kind == 5:
        given, path = (
            {rng.choice(("text", "pattern", "model")): junk(rng)},
            rng.choice(("/api/look", "/api/pattern")),
        )
    else:
        model = nested(rng) if rng.random() < 0.1 else mutate(rng, rng.choice(DECLARATIONS))
        n = rng.choice((1, 64, 64, 512, 1 << 20, None))
        given = {"model": model, "n": n, "batch": rng.choice((1, 1, 4, 1 << 20)), "train": rng.random() < 0.5}
        path = "/api/cost"
    try:
        return path, json.dumps(given).encode()
    except RecursionError:
        return path, b"{" * 3000


def studio(rng: random.Random) -> tuple[str, dict]:
    """A request of the studio's panels with one field replaced by junk, or with none."""
    large = rng.choice((0, 3, 64, 1000, 10**9))
    sized = {
        "name": rng.choice(("tiny", "tiny-gpt", "llama", "²", "")),
        "n": rng.choice((1, 512, 1 << 20)),
        "batch": 1,
    }
    said = {
        "text": rng.choice(("5, 12, 7", "1", "9" * 3000, "a b", "1,")),
        "layer": 0,
        "head": large % 3,
        "query": 1,
    }
    path, given = rng.choice(
        (
            (
                "/api/region",
                {"pattern": pattern(rng), "n": large or 1, "i": large, "j": 0, "size": large or 1},
            ),
            ("/api/pair", {"pattern": pattern(rng), "i": large, "j": 5}),
            ("/api/resized", {**sized, "layers": rng.choice((None, 1, 1000))}),
            ("/api/curve", sized),
            ("/api/fitting", {**sized, "gib": rng.choice((1e-9, 80.0, 1e300))}),
            (
                "/api/laws",
                {
                    "target": rng.choice(("sdpa", "", "os.system")),
                    "cases": 1,
                    "code": rng.choice((None, "1")),
                },
            ),
            ("/api/heads", said),
            ("/api/steps", said),
            ("/api/remove", {**said, "key": 0}),
            ("/api/next", {**said, "after": [large]}),
            ("/api/beams", {**said, "width": rng.choice((1, 8, 9)), "steps": 5}),
        )
    )
    if rng.random() < 0.6:
        given[rng.choice(list(given))] = junk(rng)
    return path, given


def send(port: int, path: str, data: bytes | None) -> tuple[int, bytes, float]:
    line, start = HTTPConnection("127.0.0.1", port, timeout=60), time.monotonic()
    try:
        line.request("GET" if data is None else "POST", path, data, {"content-type": "application/json"})
        answer = line.getresponse()
        return answer.status, answer.read(), time.monotonic() - start
    except (HTTPException, OSError) as error:
        return 0, repr(error).encode(), time.monotonic() - start
    finally:
        line.close()


def resident(pid: int) -> int:
    """Bytes of a process and its descendants."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        waiting += map(int, children)
    return total


def watch(port: int, pid: int, ready: Any, done: Any, results: Any) -> None:
    """Load the page every 50 ms, in a process of its own: the clients' interpreter does not delay it."""
    page, idle, peak, slow, began = [], [], 0, [], time.monotonic()
    while not done.is_set():
        page.append(send(port, "/", None)[2])
        if page[-1] > 0.1:
            slow.append(f"{1e3 * page[-1]:.0f} ms after {time.monotonic() - began:.1f} s")
        ready.set()
        idle.append(_sleep_lateness())
        peak = max(peak, resident(pid))
        time.sleep(0.05)
    results.put((page, idle, peak, slow))


def hostile(
    port: int, requests: int, clients: int, seed: int, pid: int, until: float, deadline: float
) -> dict:
    """At most this many requests, or as many as fit until this moment."""
    statuses: collections.Counter = collections.Counter()
    seconds: list[float] = []
    failures: list[str] = []
    late: list[str] = []
    answers: collections.Counter = collections.Counter()

    def client(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        for _ in range(requests // clients):
            if time.monotonic() > until:
                return
            path, data = body(rng)
            status, answer, took = send(port, path, data)
            statuses[status] += 1
            seconds.append(took)
            answers[answer[:50].decode(errors="replace")] += 1
            if (status == 0 and len(data) < 1 << 20) or status >= 500:
                failures.append(f"{status} {path} {data[:200]!r} {answer[:300]!r}")
            if took > deadline + 1:
                late.append(f"{took:.1f} s {status} {path} {data[:200]!r} {answer[:100]!r}")

    context = multiprocessing.get_context("spawn")
    ready, done, results = context.Event(), context.Event(), context.Queue()
    watcher = context.Process(target=watch, args=(port, pid, ready, done, results))
    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    watcher.start()
    ready.wait()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    done.set()
    page, idle, peak, slow = results.get()
    watcher.join()
    return {
        "requests": sum(statuses.values()),
        "statuses": dict(sorted(statuses.items())),
        "deadline_s": deadline,
        "longest_s": round(max(seconds), 2),
        "over_the_deadline_by_1_s": len(late),
        "late": late[:20],
        "page_median_ms": round(1e3 * statistics.median(page), 1),
        "page_99th_percentile_ms": round(1e3 * sorted(page)[int(0.99 * len(page))], 1),
        "page_longest_ms": round(1e3 * max(page), 1),
        "page_over_100_ms": len(slow),
        "slow_pages": slow[:20],
        "pages": len(page),
        # a client that only sleeps 1 ms: what the machine itself adds while others use it
        "sleep_1_ms_longest_ms": round(1e3 * max(idle), 1),
        "sleep_1_ms_median_ms": round(1e3 * statistics.median(idle), 1),
        "peak_resident_mb": peak // 10**6,
        "answers": dict(answers.most_common(12)),
        "failures": failures[:20],
    }


def _sleep_lateness() -> float:
    start = time.monotonic()
    time.sleep(0.001)
    return time.monotonic() - start


def crowd(port: int, clients: int, each: int) -> dict:
    """Right requests of many clients: how many answers were lost or wrong."""
    expected = {n: (rg.causal() & rg.window(7)).count(n) for n in range(1, each + 1)}
    wrong: list[str] = []

    def client() -> None:
        for n in expected:
            data = json.dumps({"pattern": "causal() & window(7)", "n": n}).encode()
            status, answer, _ = send(port, "/api/pattern", data)
            while status == 429:
                status, answer, _ = send(port, "/api/pattern", data)
            if status != 200 or int(json.loads(answer)["count"]) != expected[n]:
                wrong.append(f"{status} {answer[:100]!r}")

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return {"clients": clients, "each": each, "lost_or_wrong": len(wrong), "examples": wrong[:3]}


def total(rows: list[dict]) -> dict:
    """All pieces together: counts added up, the worst of each time, and the pieces themselves."""
    statuses: collections.Counter = collections.Counter()
    for row in rows:
        statuses.update(row["statuses"])
    added = ("requests", "over_the_deadline_by_1_s", "pages", "page_over_100_ms")
    worst = ("longest_s", "page_longest_ms", "page_99th_percentile_ms", "peak_resident_mb")
    return {
        **{name: sum(row[name] for row in rows) for name in added},
        "statuses": dict(sorted(statuses.items())),
        "of_5xx_or_lost": sum(len(row["failures"]) for row in rows),
        **{name: max(row[name] for row in rows) for name in worst},
        "crowds": [row["crowd"] for row in rows if "crowd" in row],
        "pieces": rows,
    }


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--requests", type=int, default=100_000, help="at most")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--crowd", type=int, nargs=2, default=(0, 0), metavar=("CLIENTS", "EACH"))
    options.add_argument("--minutes", type=float, help="of hostile requests at most")
    options.add_argument("--model", default="tiny-gpt")
    options.add_argument("--port", type=int, default=18765)
    options.add_argument("--deadline", type=float, default=10.0, help="of the server, for one request")
    options.add_argument("--load", type=int, default=0, help="other processes that compute meanwhile")
    options.add_argument("--rows", type=Path, help="one JSON object a piece, appended")
    options.add_argument("--sum", type=Path, help="start nothing: write the pieces of --rows together")
    given = options.parse_args()
    rows = []
    if given.rows and given.rows.exists():
        rows = [json.loads(line) for line in given.rows.read_text("utf-8").splitlines()]
    if given.sum:
        text = json.dumps(total(rows), indent=1, ensure_ascii=False)
        given.sum.write_text(text + "\n", encoding="utf-8")
        return
    if given.seed in {row["seed"] for row in rows}:
        raise SystemExit(f"{given.rows} has a piece with seed {given.seed}: use another --seed")
    command = [sys.executable, "-m", "regard", "serve", given.model, "--port", str(given.port)]
    command += ["--deadline", str(given.deadline)]
    server = subprocess.Popen(command)
    busy = "while True: sum(range(10_000))"
    others = [
        subprocess.Popen([sys.executable, "-c", busy], start_new_session=True) for _ in range(given.load)
    ]
    try:
        while send(given.port, "/api/pattern", b'{"pattern": "causal()"}')[0] != 200:
            time.sleep(0.2)
        before = resident(server.pid) // 10**6
        until = time.monotonic() + 60 * (given.minutes or 1e6)
        result = {
            **origin(),
            "seed": given.seed,
            "clients": given.clients,
            "load_at_start": round(os.getloadavg()[0], 1),
            "computing_processes": given.load,
            "resident_mb_at_start": before,
            **hostile(
                given.port, given.requests, given.clients, given.seed, server.pid, until, given.deadline
            ),
        }
        if given.crowd[0]:
            result["crowd"] = crowd(given.port, *given.crowd)
        start = time.monotonic()
        server.terminate()
        server.wait(20)
        result["seconds_to_end_after_SIGTERM"] = round(time.monotonic() - start, 2)
    finally:
        for process in (server, *others):
            process.kill()
    print(json.dumps(result, indent=1))
    if given.rows:
        with given.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
