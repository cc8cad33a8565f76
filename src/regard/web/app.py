"""The page and its JSON API: each response is the result of a public function.

A browser can send patterns, declarations and texts. It cannot name a file or a Python object. Long computations run
in worker processes (workers.py), so that the page and its list of presets never wait for them.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import Field, field_validator
from starlette.exceptions import HTTPException

import regard

from .. import spec
from ..cli.models import (
    LoadedModel,
    arguments,
    encoded,
    has_decoder_input,
    namer,
    own_output,
    vocabulary,
)
from ..errors import FormatError, RegardError, SpecError
from ..lens.html_report import fill, page, part
from ..lens.view import look
from ..value import MAX_DEPTH
from . import studio_tasks
from .fields import Fields, refuse_query
from .guard import Guard
from .studio import Studio, add_routes
from .studio_routes import add_task_routes
from .workers import BusyError, Workers

PARTS = Path(__file__).with_name("page")
SCRIPTS = (  # in this order; the last one starts the page
    "core.js",
    "heads_panel.js",
    "generate_panel.js",
    "patterns_panel.js",
    "cost_panel.js",
    "laws_panel.js",
    "start.js",
)
WITHOUT_DOCS: dict[str, Any] = {"title": "regard", "docs_url": None, "redoc_url": None}
MAX_COUNTED = 10**9  # positions of a pattern that is counted
MAX_TOKENS = 512  # of a text whose heads are shown


def studio_page() -> str:
    """The page with its style and its scripts; its panel of heads is the page that `regard look` writes."""

    def own(name: str) -> str:
        return (PARTS / name).read_text(encoding="utf-8")

    style, script = part("heads.css") + own("studio.css"), part("heads.js") + "".join(map(own, SCRIPTS))
    return fill(own("studio.html"), {"css": style, "js": script, "heads": part("heads.html")})


class PatternRequest(Fields):
    """A pattern in Python syntax, and the device it would run on."""

    pattern: str = Field(max_length=500)
    n: int = Field(1024, ge=1, le=MAX_COUNTED)
    device: Literal["cpu", "cuda"] = "cpu"
    train: bool = False


class CostRequest(Fields):
    """The name of a preset, or a declaration as `regard show` prints it."""

    model: str | dict[str, Any]
    n: int = Field(128, ge=1, le=1 << 20)
    batch: int = Field(1, ge=1, le=1 << 20)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    train: bool = False

    @field_validator("model")
    @classmethod
    def bound_depth(cls, model: Any) -> Any:
        """Refuse a declaration that is nested too deeply to be read, without recursion."""
        level = [model]
        for _ in range(MAX_DEPTH):
            level = [inner for v in level for inner in _children(v)]
        if level:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        return model


def _children(v: Any) -> Iterable[Any]:
    return v.values() if isinstance(v, dict) else v if isinstance(v, list) else ()


class LookRequest(Fields):
    text: str = Field(min_length=1, max_length=4000)


def create_app(
    loaded: LoadedModel | None = None,
    host: str = "127.0.0.1",
    token: str | None = None,
    workers: Workers | None = None,
    *,
    name: str = "the model",
    runs: Path | None = None,
    code: bool = False,
) -> FastAPI:
    """The application; loaded: the model whose heads it shows; token: a secret that every request has to show.

    name: of the model; runs: a folder of training runs; code: the page may send Python code, whose laws are checked.
    """
    workers = Workers() if workers is None else workers
    whole_page = HTMLResponse(studio_page())  # encoded once

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        workers.start()
        yield
        workers.stop()

    app = FastAPI(version=regard.__version__, lifespan=lifespan, **WITHOUT_DOCS)
    app.router.dependencies.append(Depends(refuse_query))
    if host != "0.0.0.0":  # so that pages of other sites cannot send requests
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[host, "localhost", "127.0.0.1"])
    app.add_middleware(Guard, token=token)

    _answer_errors(app)

    exclusively = _one_at_a_time(workers.deadline)

    @app.get("/", response_class=HTMLResponse)
    async def home() -> Response:
        return whole_page

    @app.get("/api")
    async def about() -> dict[str, Any]:
        reads = None if loaded is None else ("text" if loaded.tokenizer is not None else "ids")
        return {
            "version": regard.__version__,
            "presets": list(spec.presets()),
            "reads": reads,
            "targets": list(studio_tasks.TARGETS),
            "code": code,
        }

    @app.post("/api/pattern")
    async def pattern(request: PatternRequest) -> Response:
        return _json(await workers.run("pattern", request.model_dump()))

    @app.post("/api/cost")
    async def cost(request: CostRequest) -> Response:
        return _json(await workers.run("cost", request.model_dump()))

    @app.post("/api/look", response_class=HTMLResponse)
    def heads(request: LookRequest) -> str:
        if loaded is None:
            raise SpecError("this page was started without a model; use `regard serve MODEL`")
        return exclusively(lambda: _heads(request, loaded))

    add_task_routes(app, workers, _json, code)
    add_routes(app, None if loaded is None else Studio(loaded, name), exclusively, _json, runs)
    return app


def _one_at_a_time(deadline: int | float) -> Callable[[Callable[[], Any]], Any]:
    """A function that runs other functions, one request at a time: to limit memory, and for models with state.

    A request waits at most half its deadline, so that the other half is left for the model.
    """
    lock, wait = Lock(), deadline / 2

    def exclusively(act: Callable[[], Any]) -> Any:
        if not lock.acquire(timeout=wait):
            raise BusyError(f"the server is busy: the model was not free within {wait:g} s")
        try:
            with torch.no_grad():
                return act()
        finally:
            lock.release()

    return exclusively


def _answer_errors(app: FastAPI) -> None:
    """Errors become JSON with a sentence."""

    @app.exception_handler(RegardError)
    def regard_error(_: Request, error: RegardError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 429 if isinstance(error, BusyError) else 422)

    @app.exception_handler(RequestValidationError)
    def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": _message(error.errors())}, 422)

    @app.exception_handler(HTTPException)
    def http_error(_: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # FastAPI could not read the body
            return JSONResponse(
                {"error": "the body is not JSON that can be read: nesting, numbers, UTF-8"}, 422
            )
        return JSONResponse({"error": str(error.detail)}, error.status_code)


def _json(result: Any) -> Response:
    """JSON without FastAPI's encoder, which visits every value first."""
    return Response(json.dumps(result), media_type="application/json")


def _message(errors: Sequence[Any]) -> str:
    """The invalid fields and their errors, in words where pydantic's are those of a programmer."""
    return "; ".join(_in_words(e) for e in errors)


def _in_words(error: Any) -> str:
    field, kind, limits = ".".join(map(str, error["loc"][1:])), error["type"], error.get("ctx", {})
    if kind == "json_invalid":
        return f"the body of the request is not JSON: {error['msg']}"
    if not field and kind == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if not field:
        return "the body of the request is not a JSON object"
    if kind == "string_too_short" and limits["min_length"] == 1:
        return f"{field} is empty"
    if kind == "string_too_long":
        return f"{field} is longer than {limits['max_length']:,} characters"
    return f"{field} is missing" if kind == "missing" else f"{field}: {error['msg']}"


def _heads(request: LookRequest, loaded: LoadedModel) -> str:
    ids = _ids(request.text, loaded)
    if not ids:
        raise FormatError("this text has no tokens")
    if len(ids) > MAX_TOKENS:
        raise SpecError(f"{len(ids)} tokens are too many to show; the limit is {MAX_TOKENS}")
    source = torch.tensor([ids])
    after = own_output(loaded, source) if has_decoder_input(loaded) else None
    return page(look(loaded.model, arguments(loaded, source, after), namer(loaded.tokenizer)))


def _ids(text: str, loaded: LoadedModel) -> list[int]:
    if loaded.tokenizer is not None:
        return encoded(text, loaded.tokenizer)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise FormatError("this model has no tokenizer; use token ids, such as 5, 12, 7")
    ids, size = [int(part) for part in parts], vocabulary(loaded)
    if max(ids) >= size:
        raise FormatError(f"token {max(ids)} is out of range; this model has tokens 0 to {size - 1}")
    return ids
