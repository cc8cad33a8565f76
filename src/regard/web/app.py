"""The page and its JSON API: each response is the result of a public function.

A browser can send patterns, declarations and texts. It cannot name a file or a Python object.
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field

import regard

from .. import spec, value
from ..cli.look import LoadedModel, arguments, encoded, namer, vocabulary
from ..costs.entry import cost as price
from ..errors import FormatError, RegardError, SpecError, nearest
from ..lens.html_report import page
from ..lens.view import look
from ..pattern import parse_pattern

PAGE = Path(__file__).with_name("page.html")
MAX_EXPLAINED = 1 << 17  # positions of a pattern that is explained
MAX_COUNTED = 10**9  # positions of a pattern that is counted
MAX_DRAWN = 64  # positions that are drawn
MAX_TOKENS = 512  # of a text whose heads are shown


class PatternRequest(BaseModel):
    """A pattern in Python syntax, and the device it would run on."""

    pattern: str = Field(max_length=500)
    n: int = Field(1024, ge=1, le=MAX_COUNTED)
    device: Literal["cpu", "cuda"] = "cpu"
    train: bool = False


class CostRequest(BaseModel):
    """The name of a preset, or a declaration as `regard show` prints it."""

    model: str | dict[str, Any]
    n: int = Field(128, ge=1, le=1 << 20)
    batch: int = Field(1, ge=1, le=1 << 20)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    train: bool = False


class LookRequest(BaseModel):
    text: str = Field(min_length=1, max_length=4000)


def create_app(loaded: LoadedModel | None = None, host: str = "127.0.0.1") -> FastAPI:
    """The application; loaded: the model whose heads it shows."""
    app = FastAPI(title="regard", version=regard.__version__, docs_url=None, redoc_url=None)
    if host != "0.0.0.0":  # so that pages of other sites cannot send requests
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[host, "localhost", "127.0.0.1"])
    one_at_a_time = Lock()  # a model is run by one request at a time: memory, and models with state

    @app.exception_handler(RegardError)
    def regard_error(_: Request, error: RegardError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": _message(error.errors())}, 422)

    @app.get("/", response_class=HTMLResponse)
    def home() -> str:
        return PAGE.read_text(encoding="utf-8")

    @app.get("/api")
    def about() -> dict[str, Any]:
        reads = None if loaded is None else ("text" if loaded.tokenizer is not None else "ids")
        return {"version": regard.__version__, "presets": list(spec.presets()), "reads": reads}

    @app.post("/api/pattern")
    def pattern(request: PatternRequest) -> dict[str, Any]:
        return _pattern(request)

    @app.post("/api/cost")
    def cost(request: CostRequest) -> dict[str, Any]:
        return _cost(request)

    @app.post("/api/look", response_class=HTMLResponse)
    def heads(request: LookRequest) -> str:
        if loaded is None:
            raise SpecError("this page was started without a model; use `regard serve MODEL`")
        with one_at_a_time, torch.no_grad():
            return _heads(request, loaded)

    return app


def _message(errors: Sequence[Any]) -> str:
    """The invalid fields and their errors."""
    return "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in errors)


def _pattern(request: PatternRequest) -> dict[str, Any]:
    pattern = parse_pattern(request.pattern)
    count = pattern.count(request.n)
    result: dict[str, Any] = {
        "pattern": repr(pattern),
        "count": str(count),  # as text: JavaScript's numbers are exact up to 2⁵³
        "pairs": str(request.n**2),
        "share": count / request.n**2,
        "rows": [
            "".join("01"[x] for x in row) for row in pattern.allowed(min(request.n, MAX_DRAWN)).int().tolist()
        ],
        "explained": None,
    }
    if request.n <= MAX_EXPLAINED:
        result["explained"] = str(
            regard.explain(pattern, n=request.n, device=request.device, grad=request.train)
        )
    return result


def _cost(request: CostRequest) -> dict[str, Any]:
    if isinstance(request.model, dict):
        declared = value.from_plain(request.model, spec.KINDS)
    elif request.model in spec.presets():
        declared = spec.preset(request.model)
    else:
        raise SpecError(f"unknown preset {request.model!r}; {nearest(request.model, spec.presets())}")
    cost = price(
        declared,
        n=None if isinstance(declared, spec.Vision) else request.n,
        batch=request.batch,
        dtype=request.dtype,
        device=request.device,
        train=request.train,
    )
    return {"text": str(cost), "cost": cost.plain()}


def _heads(request: LookRequest, loaded: LoadedModel) -> str:
    ids = _ids(request.text, loaded)
    if not ids:
        raise FormatError("this text has no tokens")
    if len(ids) > MAX_TOKENS:
        raise SpecError(f"{len(ids)} tokens are too many to show; the limit is {MAX_TOKENS}")
    return page(look(loaded.model, arguments(loaded, torch.tensor([ids]), None), namer(loaded.tokenizer)))


def _ids(text: str, loaded: LoadedModel) -> list[int]:
    if loaded.tokenizer is not None:
        return encoded(text, loaded.tokenizer)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise FormatError("this model has no tokenizer; use token ids, such as 5, 12, 7")
    ids, size = [int(part) for part in parts], vocabulary(loaded)
    if max(ids) >= size:
        raise FormatError(f"token {max(ids)} is out of range; this model has tokens 0 to {size - 1}")
    return ids
