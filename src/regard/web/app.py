"""The page and what it asks for, as JSON: each answer is what a public function says.

A browser may send patterns, declarations and texts. It cannot name a file or a Python object.
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
from ..cli.look import Asked, arguments, encoded, namer, vocabulary
from ..costs.entry import cost as price
from ..errors import FormatError, RegardError, SpecError, nearest
from ..lens.html_report import page
from ..lens.view import look
from ..pattern import parse_pattern

PAGE = Path(__file__).with_name("page.html")
LONGEST = 1 << 17  # positions of a pattern that is explained; counting alone goes on to FARTHEST
FARTHEST = 10**9
DRAWN = 64  # positions that are drawn
LOOKED = 512  # positions of a text whose heads are shown


class OfPattern(BaseModel):
    """A pattern as it is written in Python, and where it would run."""

    pattern: str = Field(max_length=500)
    n: int = Field(1024, ge=1, le=FARTHEST)
    device: Literal["cpu", "cuda"] = "cpu"
    train: bool = False


class OfModel(BaseModel):
    """A preset by its name, or a declaration as `regard show` writes it."""

    model: str | dict[str, Any]
    n: int = Field(128, ge=1, le=1 << 20)
    batch: int = Field(1, ge=1, le=1 << 20)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    train: bool = False


class OfText(BaseModel):
    text: str = Field(min_length=1, max_length=4000)


def made(asked: Asked | None = None, host: str = "127.0.0.1") -> FastAPI:
    """The application; asked: the model whose heads it shows."""
    app = FastAPI(title="regard", version=regard.__version__, docs_url=None, redoc_url=None)
    if host != "0.0.0.0":  # no other site's page may ask in its visitor's name
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[host, "localhost", "127.0.0.1"])
    one_at_a_time = Lock()  # looking puts itself in the place of PyTorch's functions

    @app.exception_handler(RegardError)
    def refused(_: Request, error: RegardError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": _complaint(error.errors())}, 422)

    @app.get("/", response_class=HTMLResponse)
    def home() -> str:
        return PAGE.read_text(encoding="utf-8")

    @app.get("/api")
    def about() -> dict[str, Any]:
        reads = None if asked is None else ("text" if asked.tokenizer is not None else "ids")
        return {"version": regard.__version__, "presets": list(spec.presets()), "reads": reads}

    @app.post("/api/pattern")
    def of_pattern(given: OfPattern) -> dict[str, Any]:
        return _of_pattern(given)

    @app.post("/api/cost")
    def of_model(given: OfModel) -> dict[str, Any]:
        return _of_model(given)

    @app.post("/api/look", response_class=HTMLResponse)
    def of_text(given: OfText) -> str:
        if asked is None:
            raise SpecError("this page was started without a model: regard serve MODEL")
        with one_at_a_time, torch.no_grad():
            return _of_text(given, asked)

    return app


def _complaint(errors: Sequence[Any]) -> str:
    """What is wrong with which field."""
    return "; ".join(f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in errors)


def _of_pattern(given: OfPattern) -> dict[str, Any]:
    pattern = parse_pattern(given.pattern)
    count = pattern.count(given.n)
    told: dict[str, Any] = {
        "pattern": repr(pattern),
        "count": str(count),  # a number of JavaScript ends at 2⁵³
        "pairs": str(given.n**2),
        "share": count / given.n**2,
        "rows": [
            "".join("01"[x] for x in row) for row in pattern.allowed(min(given.n, DRAWN)).int().tolist()
        ],
        "explained": None,
    }
    if given.n <= LONGEST:
        told["explained"] = str(regard.explain(pattern, n=given.n, device=given.device, grad=given.train))
    return told


def _of_model(given: OfModel) -> dict[str, Any]:
    if isinstance(given.model, dict):
        declared = value.from_plain(given.model, spec.KINDS)
    elif given.model in spec.presets():
        declared = spec.preset(given.model)
    else:
        raise SpecError(f"{given.model!r} is no preset; {nearest(given.model, spec.presets())}")
    cost = price(
        declared,
        n=None if isinstance(declared, spec.Vision) else given.n,
        batch=given.batch,
        dtype=given.dtype,
        device=given.device,
        train=given.train,
    )
    return {"told": str(cost), "cost": cost.plain()}


def _of_text(given: OfText, asked: Asked) -> str:
    ids = _ids(given.text, asked)
    if not ids:
        raise FormatError("there is no token in this text")
    if len(ids) > LOOKED:
        raise SpecError(f"{len(ids)} positions are too many to show; up to {LOOKED}")
    return page(look(asked.model, arguments(asked, torch.tensor([ids]), None), namer(asked.tokenizer)))


def _ids(text: str, asked: Asked) -> list[int]:
    if asked.tokenizer is not None:
        return encoded(text, asked.tokenizer)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise FormatError("there is no tokenizer beside this model; write ids, as in 5, 12, 7")
    ids, known = [int(part) for part in parts], vocabulary(asked)
    if max(ids) >= known:
        raise FormatError(f"this model has tokens 0 to {known - 1}; {max(ids)} is none")
    return ids
