"""The console script. It imports nothing large, so that Ctrl-C is handled from the start."""

import os
import signal
import sys
from contextlib import suppress
from typing import Any

INTERRUPTED = 130  # what shells report for Ctrl-C


def run() -> None:
    """`regard …`: an error is one sentence on stderr and exit code 2; Ctrl-C is exit code 130.

    Ctrl-C ends the process at once, except where a command handles it: the training loop, which saves a checkpoint,
    and the server. A KeyboardInterrupt could be lost in a callback of an extension, or in code that catches every
    exception, as the imports of large libraries do.
    """
    signal.signal(signal.SIGINT, _leave)
    try:
        from .main import run as run_command  # with typer; PyTorch only where a command needs it
    except ModuleNotFoundError as e:  # the console script is installed with the core
        sys.stderr.write(f"error: {e}; the command line needs an extra: pip install 'regard[cli]'\n")
        sys.exit(2)

    try:
        run_command()
    except KeyboardInterrupt:  # a second Ctrl-C in the training loop
        _leave()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            # If the interrupt came during code of an extension, Python would still kill itself with the signal at
            # exit, although the interrupt was handled.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
    finally:
        # The command has ended. While Python shuts down it would restore the default action of Ctrl-C, which kills
        # the process, so that a command that succeeded would not exit with 0.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(*_: Any) -> None:
    """Exit at once. Files are written under a temporary name and renamed, so none is left half written."""
    with suppress(Exception):  # the signal may have come while stdout was written
        sys.stdout.flush()
    sys.stderr.write("interrupted\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)
