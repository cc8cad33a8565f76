"""Processes that compute the answers of the service, so that a request can be ended and its memory is bounded.

A request has one deadline for waiting and computing. A worker that misses it is killed and replaced; a worker process
that allocates too much gets a MemoryError. The server itself only receives, validates and sends.
"""

import asyncio
import json
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from ..errors import RegardError, SpecError

GIB = 1 << 30
CONTEXT: Any = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")


class BusyError(RegardError):
    """No worker became free before the deadline."""


class Workers:
    """`size` processes that run the functions of `tasks.TASKS`, one request each at a time."""

    def __init__(self, size: int = 2, deadline: int | float = 10.0, memory: int = 2 * GIB):
        self.size, self.deadline, self.memory = size, deadline, memory
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: list[_Worker] = []
        self._threads = ThreadPoolExecutor(
            size, thread_name_prefix="regard-worker"
        )  # each waits for one worker

    def start(self) -> None:
        """Start the processes; they import PyTorch once, in the server that they are forked from."""
        if os.name == "posix":
            CONTEXT.set_forkserver_preload(["regard.web.tasks"])
        for _ in range(self.size):
            self._workers.append(_Worker(self.memory))
            self._free.put_nowait(self._workers[-1])

    def stop(self) -> None:
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, task: str, fields: dict[str, Any]) -> Any:
        """The result of a task, or the RegardError that it raised."""
        last = time.monotonic() + self.deadline
        try:
            worker = await asyncio.wait_for(self._free.get(), self.deadline)
        except TimeoutError:
            raise BusyError(f"the server is busy: no worker was free within {self.deadline:g} s") from None
        try:
            loop = asyncio.get_running_loop()
            seconds = max(0.0, last - time.monotonic())
            failed, result = await loop.run_in_executor(self._threads, worker.ask, task, fields, seconds)
        finally:
            self._free.put_nowait(worker)
        if failed == "deadline":
            raise SpecError(
                f"this takes longer than {self.deadline:g} s, the limit of this server; use the library, or "
                "start the server with another --deadline"
            )
        if failed:
            raise SpecError(result)
        return result


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, memory: int):
        self.memory = memory
        self._start()

    def _start(self) -> None:
        from . import tasks

        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=tasks.serve, args=(theirs, self.memory), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False

    def ask(self, task: str, fields: dict[str, Any], seconds: float) -> tuple[str, Any]:
        """("", result), ("error", sentence) or ("deadline", None)."""
        if not self.ready:  # the time that a new process needs to start is not the request's
            self.ready = self.pipe.poll(60) and self.pipe.recv_bytes() == b"ready"
        try:
            self.pipe.send_bytes(json.dumps((task, fields)).encode())
            if self.pipe.poll(seconds):
                return _received(self.pipe)
            failed: tuple[str, Any] = ("deadline", None)
        except (EOFError, OSError):
            failed = ("error", f"this needs more than the {self.memory / GIB:g} GiB that this server allows")
        self.end()
        self._start()
        return failed

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _received(pipe: Connection) -> tuple[str, Any]:
    failed, result = json.loads(pipe.recv_bytes())
    if failed == "bug":  # an error of ours: the server reports status 500 and prints the traceback
        raise RuntimeError(result)
    return failed, result
