"""Programs in processes that are new but for PyTorch, which takes a second to import.

A server is started at the first call. It imports PyTorch and nothing else, and forks a child for each program: what
the program imports besides PyTorch, and what it changes, is its own. Where there is no fork, Python is started.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

_OWN = threading.local()  # each thread has a server, as one answers after the other


def run(program: str | Path, *words: str, env: dict[str, str] | None = None, timeout: int = 300):
    """As subprocess.run of Python with a file or, for a string, with -c. env: all of it, not only what differs."""
    env = dict(os.environ if env is None else env)
    command = [*([] if isinstance(program, Path) else ["-c"]), str(program), *words]
    if not hasattr(os, "fork"):
        return subprocess.run(
            [sys.executable, *command], env=env, capture_output=True, text=True, timeout=timeout
        )
    server = _started()
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        asked = {"command": command, "env": env, "cwd": os.getcwd(), "out": str(out), "err": str(err)}
        server.stdin.write(json.dumps({**asked, "timeout": timeout}) + "\n")
        server.stdin.flush()
        code = json.loads(server.stdout.readline())
        return subprocess.CompletedProcess(command, code, out.read_text("utf-8"), err.read_text("utf-8"))


def _started() -> subprocess.Popen:
    server = getattr(_OWN, "server", None)
    if server is None or server.poll() is not None:
        env, pipe = {**os.environ, "OMP_NUM_THREADS": "1"}, subprocess.PIPE
        server = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, env=env)
        _OWN.server = server
        atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen) -> None:
    server.stdin.close()
    server.wait()
    server.stdout.close()


def _serve() -> None:
    import torch  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(**asked)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(command: list[str], env: dict[str, str], cwd: str, out: str, err: str, timeout: int) -> None:
    """Run the program, as `python …` does, and end this process."""
    for name, target in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_RDONLY if target == 0 else os.O_WRONLY | os.O_CREAT), target)
    signal.alarm(timeout)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    is_code = command[0] == "-c"
    own = "" if is_code else str(Path(command[0]).parent)
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [own, *given, *(path for path in sys.path[1:] if path not in given)]
    sys.argv = ["-c", *command[2:]] if is_code else command
    code = 0
    try:
        source = command[1] if is_code else Path(command[0]).read_text("utf-8")
        main = sys.modules["__main__"] = type(sys)("__main__")
        if not is_code:
            main.__file__ = command[0]
        exec(compile(source, "<string>" if is_code else command[0], "exec"), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
