"""Processes that compute the answers of the service, so that a request can be ended and its memory is bounded.

A request has one deadline for waiting and computing. A worker that misses it is killed, and is available again when
its new process has started, so that no request waits for that. A worker process that allocates too much gets a
MemoryError. The processes run at a lower priority than the server, which only receives, validates and sends.
"""

import asyncio
import json
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ..errors import RegardError, SpecError

GIB = 1 << 30
CONTEXT: Any = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")


class BusyError(RegardError):
    """No worker became available before the deadline."""


class Workers:
    """`size` processes that run the functions of `tasks.TASKS`, one request each at a time."""

    def __init__(self, size: int = 2, deadline: int | float = 10.0, memory: int = 2 * GIB):
        self.size, self.deadline, self.memory = size, deadline, memory
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: list[_Worker] = []
        self._running = False
        self._threads = ThreadPoolExecutor(
            size, thread_name_prefix="regard-worker"
        )  # each waits for one worker

    def start(self) -> None:
        """Start the processes, in a running event loop; they import PyTorch once, in the one they are forked from."""
        if os.name == "posix":
            CONTEXT.set_forkserver_preload(["regard.web.tasks"])
        self._workers = [_Worker(self.memory) for _ in range(self.size)]
        self._running = True
        loop = asyncio.get_running_loop()
        self._started = asyncio.gather(*(loop.run_in_executor(self._threads, w.start) for w in self._workers))
        for worker in self._workers:
            self._free.put_nowait(worker)

    def stop(self) -> None:
        self._running = False
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, task: str, fields: dict[str, Any]) -> Any:
        """The result of a task, or the RegardError that it raised."""
        await asyncio.shield(self._started)  # the time in which the server starts is not the request's
        last = time.monotonic() + self.deadline
        try:
            worker = await asyncio.wait_for(self._free.get(), self.deadline)
        except TimeoutError:
            raise BusyError(f"the server is busy: no worker was free within {self.deadline:g} s") from None
        seconds = max(0.0, last - time.monotonic())
        loop = asyncio.get_running_loop()
        pending = loop.run_in_executor(self._threads, worker.request, task, fields, seconds)
        pending.add_done_callback(lambda _: self._release(worker))  # also if this request is cancelled
        failed, result = await asyncio.shield(pending)
        if failed == "deadline":
            raise SpecError(
                f"this takes longer than {self.deadline:g} s, the limit of this server; use the library, or "
                "start the server with another --deadline"
            )
        if failed:
            raise SpecError(result)
        return result

    def _release(self, worker: "_Worker") -> None:
        """Make the worker available for the next request, at once or when its new process has started."""
        if worker.alive or not self._running:
            self._free.put_nowait(worker)
            return
        started = asyncio.get_running_loop().run_in_executor(self._threads, worker.start)
        started.add_done_callback(lambda _: self._free.put_nowait(worker))


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, memory: int):
        self.memory, self.alive = memory, False
        self.process: Any = None

    def start(self) -> None:
        """Start a process, to replace one that has ended, and wait until it is ready."""
        from . import tasks

        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=tasks.serve, args=(theirs, self.memory), daemon=True)
        self.process.start()
        theirs.close()
        with suppress(EOFError, OSError):  # the server ends while this process starts, or it cannot start
            self.alive = self.pipe.recv_bytes() == b"ready"

    def request(self, task: str, fields: dict[str, Any], seconds: float) -> tuple[str, Any]:
        """("", result), ("error", sentence) or ("deadline", None); after a deadline the process is gone."""
        try:
            self.pipe.send_bytes(json.dumps((task, fields)).encode())
            if self.pipe.poll(seconds):
                return _received(self.pipe)
            failed: tuple[str, Any] = ("deadline", None)
        except (EOFError, OSError):
            failed = ("error", f"this needs more than the {self.memory / GIB:g} GiB that this server allows")
        self.end()
        return failed

    def end(self) -> None:
        self.alive = False
        if self.process is None:  # not started yet
            return
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _received(pipe: Connection) -> tuple[str, Any]:
    failed, result = json.loads(pipe.recv_bytes())
    if failed == "bug":  # an error of ours: the server reports status 500 and prints the traceback
        raise RuntimeError(result)
    return failed, result
