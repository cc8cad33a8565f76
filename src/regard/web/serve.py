"""`regard serve`: the local web page."""

import errno
import socket
import webbrowser
from typing import Annotated

import typer

from ..cli.forms import FORMS
from ..errors import SpecError


def serve(
    model: Annotated[str | None, typer.Argument(help=f"The model whose heads are shown: {FORMS}.")] = None,
    host: Annotated[
        str, typer.Option(help="A host name or IPv4 address; 0.0.0.0 for access from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8765,
    browse: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve a web page: patterns drawn and explained, costs, the heads of a model.

    Example: regard serve runs/translate --open
    """
    try:
        import uvicorn

        from .app import create_app
    except ModuleNotFoundError as e:
        raise SpecError(f"the page needs an extra ({e}): pip install 'regard[web]'") from e
    from ..cli.look import image_size, load

    _check_port(host, port)
    loaded = None if model is None else load(model)
    if loaded is not None and image_size(loaded.config):
        raise SpecError(
            f"{model} takes images, and the page takes text; use `regard look {model} IMAGE --out heads.html`"
        )
    page = create_app(loaded, host)
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    typer.echo(f"{address} (Ctrl-C to stop)", err=True)
    if browse:
        webbrowser.open(address)
    uvicorn.run(page, host=host, port=port, log_level="warning")


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
