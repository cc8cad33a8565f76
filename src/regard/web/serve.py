"""`regard serve`: the local web page."""

import errno
import gc
import secrets
import socket
import sys
import webbrowser
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..cli import names
from ..cli.forms import FORMS
from ..cli.options import with_options
from ..errors import SpecError

LOOPBACK = ("127.0.0.1", "localhost")
SWITCH_SECONDS = 0.0005


@dataclass(frozen=True)
class ServeRequest:
    """The argument and options of `regard serve`, one field each."""

    model: Annotated[
        str | None,
        typer.Argument(
            help=f"The model to show: {FORMS}; by default, the included translator.",
            autocompletion=names.models,
        ),
    ] = None
    host: Annotated[
        str, typer.Option(help="A host name or IPv4 address; 0.0.0.0 for access from other machines.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8765
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False
    deadline: Annotated[float, typer.Option(min=0.1, help="Time limit of a request, in seconds.")] = 10.0
    workers: Annotated[int, typer.Option(min=1, max=64, help="Requests that run at the same time.")] = 2
    memory: Annotated[float, typer.Option(min=0.1, help="Memory limit of a request, in GiB.")] = 2.0
    runs: Annotated[
        Path | None, typer.Option(help="A folder of training runs; by default, ./runs if it exists.")
    ] = None
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Let the page check Python code; anyone who opens the page can then run code here.",
        ),
    ] = False


@partial(with_options, ServeRequest)
def serve(request: ServeRequest) -> None:
    """Serve a local web page: heads, translation, patterns, cost, laws and training runs.

    Example: regard serve runs/translate --open
    """
    try:
        import uvicorn

        from .app import create_app
        from .protocol import TimedProtocol
        from .workers import GIB, Workers
    except ModuleNotFoundError as e:
        raise SpecError(f"the page needs an extra ({e}): pip install 'regard[web]'") from e
    from ..cli.models import image_size, included_translator, load

    _check_port(request.host, request.port)
    runs = request.runs
    if runs is not None and not runs.is_dir():
        raise SpecError(f"--runs {runs}: there is no such folder")
    if runs is None and Path("runs").is_dir():
        runs = Path("runs")
    host, model = request.host, request.model
    loaded = included_translator() if model is None else load(model)
    if image_size(loaded.config):
        raise SpecError(
            f"{model} takes images, and the page takes text; use `regard look {model} IMAGE --out heads.html`"
        )
    token = None if host in LOOPBACK else secrets.token_urlsafe(16)
    pool = Workers(request.workers, request.deadline, int(request.memory * GIB))
    name = model or "the translator of regard, English to Spanish"
    page = create_app(loaded, host, token, pool, name=name, runs=runs, code=request.allow_code)
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{request.port}" + (
        f"/?token={token}" if token else ""
    )
    if token:
        typer.echo(
            f"warning: {host} is open to other machines, without encryption; only requests with the token are "
            "answered",
            err=True,
        )
    typer.echo(f"{address} (Ctrl-C to stop)", err=True)
    if request.browse:
        webbrowser.open(address)
    # PyTorch's modules are a quarter of a million objects. A full collection that visits them stops the server for
    # some tenths of a second; frozen ones are not visited.
    gc.freeze()
    # Models run in threads of this process. After each system call the thread that serves the page waits for a thread
    # in Python code to give up the interpreter: 5 ms by default, ten times a page.
    sys.setswitchinterval(SWITCH_SECONDS)
    uvicorn.run(
        page, host=host, port=request.port, log_level="warning", http=TimedProtocol, timeout_keep_alive=5
    )


def _check_port(host: str, port: int) -> None:
    """Refuse a port that is in use, before a model is loaded."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise SpecError(f"port {port} is in use on {host}; use another --port") from e
            raise SpecError(f"cannot listen on {host}:{port}: {e.strerror}; use another --host") from e
