"""Wrong command lines of `regard`, seeded: each command with bad values, bad files and options that do not belong.

`python tests/helpers/cli_fuzz.py [COUNT] [SEED] [COMMAND]` runs COUNT of them for each command and prints those that
end in a traceback, in the exit code of a crash, or after more than a minute.
"""

import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

SECONDS = 60
INTEGERS = ("-1", "0", "1", "16", "abc", "1.5", "9" * 30, "", "nan", "1e9", "-0", "0x10", "١٢")
TEXTS = ("", " ", "-", "--", "\x00", "😀", "a" * 3000, "../..", "~", "%s", "{}", "[]", "None", "=", "a=b=c")
PATTERNS = (
    "causal()",
    "causal",
    "widow(2)",
    "window(-1)",
    "window(2",
    "~" * 300 + "full()",
    "window(1e9)",
    "1 + 1",
)
MODELS = (
    "tiny-gpt",
    "gtp2",
    "tiny-vit",
    "torch.nn:Linear",
    "torch.nn:",
    ":",
    "os:getcwd",
    "math:pi",
    "hf:",
    "hf:x",
)
FILES = (
    "missing.json",
    "folder",
    "folder.json",
    "empty.json",
    "bytes.json",
    "broken.json",
    "list.json",
    "deep.json",
    "null.json",
    "foreign.json",
    "number.json",
    "bytes.yaml",
    "alias.yaml",
    "bytes.txt",
    "empty.txt",
    "one.tsv",
    "bad.png",
    "bad.npy",
    "raises.py:model",
    "raises.py:missing",
    "fine.py:model",
    "run",
    "damaged-run",
    "/proc/nothing/here",
    "/dev/null",
)
SETTINGS = (
    "steps=0",
    "steps=-1",
    "d_model=abc",
    "d_model=10**9",
    "minutes=-1",
    "vocab=-3",
    "data=x.tsv",
    "heads=7",
)
SETTINGS += (
    "rate=[]",
    "layers=null",
    "seed=true",
    "=",
    "steps",
    "dropout=2",
    "tokens=0",
    "context=-1",
    "fold=9",
)
POOLS = {
    "INT": INTEGERS,
    "MODEL": MODELS + FILES,
    "PATTERN": PATTERNS + TEXTS,
    "DEVICE": ("cpu", "tpu", "gpu", "cuda", "cuda:99", "meta", "", "CPU"),
    "DTYPE": ("float32", "fp8", "int8", "bfloat16", "", "torch.float32"),
    "MEMORY": ("80GB", "-1GB", "80 apples", "", "0", "1e9", "80GiBs", "9" * 40),
    "GPU": ("h100", "zz", "h100,zz", "", ",", "h100,"),
    "INPUT": ("3,1,4", "random:3", "random:-1", "random:x", "999999", "1,,2", "text", *FILES, *TEXTS),
    "OUT": (
        "new.html",
        "new.txt",
        "folder",
        "bytes.json",
        "/proc/x.html",
        "missing/x.html",
        "",
        "x" * 300 + ".html",
    ),
    "SET": SETTINGS + TEXTS,
    "FILE": FILES + TEXTS,
    "RECIPE": (
        "translate",
        "classify",
        "language-model",
        "image",
        "masked-language-model",
        "T5",
        "T99",
        "trnslate",
    ),
    "NAME": ("translate", "classify", "language-model", "image", "masked-language-model", "T99", "trnslate"),
    "LAW": ("L01", "L99", "causality", "", "P03", "no law"),
    "KIND": ("attention", "layer-norm", "spoon", ""),
    "TEXT": TEXTS,
    "OPTIMIZER": ("adamw", "adamw:fused", "adamw:quick", "spoon", ":", ""),
}
COMMANDS = {
    "presets": "presets --json",
    "show": "show MODEL",
    "explain": "explain PATTERN --n INT --device DEVICE --draw --json",
    "cost": "cost MODEL --n INT --m INT --batch INT --dtype DTYPE --device DEVICE --train --optimizer OPTIMIZER "
    "--autocast DTYPE --fits MEMORY --json",
    "compare": "cost compare --n INT --d INT --kernel INT --w INT --json",
    "plan": "plan MODEL --gpu GPU --memory MEMORY --n INT --ranks INT --pattern PATTERN --json",
    "check": "check MODEL --law LAW --heads INT --d-model INT --cases 1 --device DEVICE --with SET --as KIND "
    "--claim TEXT --html OUT --json",
    "look": "look MODEL INPUT --target INPUT --out OUT --seed INT --effects --json",
    "train": "train RECIPE --set SET --set SET --out FILE --device DEVICE --data FILE --valid FILE --test FILE "
    "--threads INT --heads-every INT --show --json",
    "train-here": "train NAME --set steps=0 --set SET --out FILE --device DEVICE --data FILE",
    "report": "report FILE --json",
    "translate": "translate TEXT --model FILE --file FILE --beam INT --json",
    "export": "export FILE --out FILE --to TEXT --json",
    "bench": "bench machine --device DEVICE --path FILE --size INT --json",
    "serve": "serve MODEL --port INT --host TEXT --deadline INT --workers INT --memory INT",
}
STRAY = ("--nonsense", "-x", "stray", "--n", "--json=3")
ALWAYS = {  # what keeps a case that happens to be right from running for long
    "bench": ["--device", "tpu"],
    "serve": ["--port", "0"],
    "train": ["--show"],
    "train-here": ["--set", "steps=0"],
    "check": ["--cases", "1"],
}


def write_files(folder: Path) -> None:
    """The bad files that the command lines name."""
    (folder / "folder").mkdir()
    (folder / "folder.json").mkdir()
    for name, text in {
        "empty.json": "",
        "broken.json": '{"kind": "Attention", ',
        "list.json": "[1, 2]",
        "deep.json": "[" * 5000 + "]" * 5000,
        "null.json": "null",
        "foreign.json": '{"model_type": "no-such-model"}',
        "number.json": '{"kind": "Attention", "d_model": 1e400, "heads": -1}',
        "alias.yaml": "a: &x 1\nb: *x\n",
        "empty.txt": "",
        "one.tsv": "one\ttwo\n",
        "bad.png": "no image",
        "bad.npy": "no array",
        "raises.py": "raise ValueError('broken module')\n",
        "fine.py": "def model():\n    raise KeyError('no model today')\n",
    }.items():
        (folder / name).write_text(text)
    for name in ("bytes.json", "bytes.yaml", "bytes.txt"):
        (folder / name).write_bytes(b"\xff\xfe\x00\x01")
    for name, recipe in (("run", '{"kind": "Recipe"}'), ("damaged-run", "{")):
        (folder / name / "model").mkdir(parents=True)
        for file in ("recipe.json", "tokens.json", "model/config.json", "evaluation.json", "preflight.json"):
            (folder / name / file).write_text(recipe)


def lines(command: str, count: int, seed: int = 0) -> Iterator[list[str]]:
    """Wrong command lines of one command."""
    rng = random.Random(f"{seed} {command}")
    for _ in range(count):
        words: list[str] = []
        known = COMMANDS[command].split()
        template = iter(known)
        for word in template:
            if word.startswith("--"):
                follows = known[known.index(word) + 1 :][:1]
                takes = bool(follows) and not follows[0].startswith("--")
                value = next(template) if takes else None
                if rng.random() < 0.45:
                    words += [word] if value is None else [word, rng.choice(POOLS.get(value, (value,)))]
            elif word in POOLS:
                words += [rng.choice(POOLS[word])] if rng.random() < 0.93 else []
            else:
                words.append(word)
        if rng.random() < 0.2:
            words.insert(
                rng.randrange(1, len(words) + 1), rng.choice(("--nonsense", "-x", "stray", "--n", "--json=3"))
            )
        yield words + ALWAYS.get(command, [])


class TooSlow(BaseException):
    """A command line took longer than SECONDS."""


def _too_slow(*_: object) -> None:
    raise TooSlow


def failure(words: list[str]) -> str | None:
    """What is wrong with the way in which a command line ended; None where it is fine."""
    from regard.cli.main import app
    from regard.errors import RegardError

    before = signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(SECONDS)
    try:
        done = CliRunner().invoke(app, words)
    except TooSlow:
        return f"took longer than {SECONDS} s"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    error = done.exception
    if error is None or isinstance(error, SystemExit):
        return None if done.exit_code in (0, 1, 2) else f"exit code {done.exit_code}"
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, RegardError):
        return None  # regard.cli.main.run makes a sentence of it
    if isinstance(error, RegardError):
        return None if str(error).strip() else "an empty message"
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    import os
    import tempfile

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    bad = 0
    home = Path(tempfile.mkdtemp())
    write_files(home)
    os.chdir(home)
    for name in sys.argv[3:] or COMMANDS:
        began, failed = time.monotonic(), 0
        for words in lines(name, count, seed):
            if (problem := failure(words)) is not None:
                failed += 1
                print(f"{words}\n    {problem[:300]}", flush=True)
        bad += failed
        print(
            f"{name}: {count} command lines, {failed} failures, {time.monotonic() - began:.0f} s", flush=True
        )
    sys.exit(bad > 0)
