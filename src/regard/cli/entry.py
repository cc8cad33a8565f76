"""The console script. It imports nothing of size, so that Ctrl-C is handled from the first moment on."""

import os
import signal
import sys
from typing import Any

INTERRUPTED = 130  # what shells report for Ctrl-C


def run() -> None:
    """`regard …`: an error is one sentence on stderr and exit code 2; Ctrl-C is exit code 130."""
    before = signal.signal(signal.SIGINT, _leave)
    try:
        from .main import run as run_command  # with typer; PyTorch only where a command needs it

        signal.signal(signal.SIGINT, before)
        run_command()
    except KeyboardInterrupt:
        _leave()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            # Python remembers an interrupt that fell into code of an extension, and at its end would kill itself by
            # the signal, although the interrupt was handled.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise


def _leave(*_: Any) -> None:
    """Leave at once: nothing has been written yet, and a half-imported module cannot be used."""
    sys.stderr.write("interrupted\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)
