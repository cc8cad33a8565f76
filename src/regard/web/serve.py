"""`regard serve`: the page, on this machine."""

import socket
import webbrowser
from typing import Annotated

import typer

from ..cli import targets
from ..cli.look import image_size, load
from ..errors import SpecError


def serve(
    model: Annotated[
        str | None, typer.Argument(help=f"Whose heads to see: {targets.FORMS}. Without one, no heads.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="A name or IPv4 address; 0.0.0.0 for other machines too.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8765,
    browse: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Serve a page: draw and explain patterns, price models, see the heads of one.

    Example: regard serve runs/translate --open
    """
    try:
        import uvicorn

        from .app import made
    except ModuleNotFoundError as e:
        raise SpecError(f"the page needs more ({e}): pip install 'regard[web]'") from e
    _free(host, port)
    asked = None if model is None else load(model)
    if asked is not None and image_size(asked.config):
        raise SpecError(
            f"{model} reads images, and the page texts; regard look {model} PICTURE --out heads.html"
        )
    page = made(asked, host)
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    typer.echo(f"{address} (Ctrl-C ends it)", err=True)
    if browse:
        webbrowser.open(address)
    uvicorn.run(page, host=host, port=port, log_level="warning")


def _free(host: str, port: int) -> None:
    """Say what to do where the port cannot be had, before a model is loaded."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((host, port))
        except OSError as e:
            raise SpecError(
                f"{host}:{port} cannot be had: {e.strerror}; give another --port or --host"
            ) from e
