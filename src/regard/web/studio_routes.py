"""The studio's requests that worker processes compute: regions of a pattern, curves of a cost, laws."""

from collections.abc import Callable
from typing import Any, Literal

from fastapi import FastAPI, Response
from pydantic import Field

from ..errors import SpecError
from .fields import Fields
from .workers import Workers

MAX_LENGTH = 10**9


class RegionRequest(Fields):
    """A square of a pattern of n positions."""

    pattern: str = Field(max_length=500)
    n: int = Field(1024, ge=1, le=MAX_LENGTH)
    i: int = Field(0, ge=0, le=MAX_LENGTH)
    j: int = Field(0, ge=0, le=MAX_LENGTH)
    size: int = Field(64, ge=1, le=MAX_LENGTH)


class PairRequest(Fields):
    pattern: str = Field(max_length=500)
    i: int = Field(ge=0, le=MAX_LENGTH)
    j: int = Field(ge=0, le=MAX_LENGTH)


class TimingRequest(Fields):
    """A pattern that is run here."""

    pattern: str = Field(max_length=500)
    n: int = Field(1024, ge=1, le=4096)
    train: bool = False


class ResizedRequest(Fields):
    """A preset at other sizes; layers: None for as many as it declares."""

    name: str = Field(max_length=100)
    n: int = Field(128, ge=1, le=1 << 20)
    batch: int = Field(1, ge=1, le=1 << 20)
    layers: int | None = Field(None, ge=1, le=1000)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    train: bool = False


class CurveRequest(Fields):
    name: str = Field(max_length=100)
    batch: int = Field(1, ge=1, le=1 << 20)


class FittingRequest(Fields):
    name: str = Field(max_length=100)
    n: int = Field(128, ge=1, le=1 << 20)
    gib: float = Field(80.0, gt=0, le=1 << 20)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    train: bool = False


class LawsRequest(Fields):
    """The name of an implementation that the page lists, or code where the server's owner allows it."""

    target: str = Field("", max_length=100)
    code: str | None = Field(None, max_length=20_000)
    cases: int = Field(3, ge=1, le=40)


def add_task_routes(app: FastAPI, workers: Workers, to_json: Callable[[Any], Response], code: bool) -> None:
    """code: requests may send Python code."""

    @app.post("/api/region")
    async def region(request: RegionRequest) -> Response:
        return to_json(await workers.run("region", request.model_dump()))

    @app.post("/api/pair")
    async def pair(request: PairRequest) -> Response:
        return to_json(await workers.run("pair", request.model_dump()))

    @app.post("/api/timing")
    async def timing(request: TimingRequest) -> Response:
        return to_json(await workers.run("timing", request.model_dump()))

    @app.post("/api/resized")
    async def resized(request: ResizedRequest) -> Response:
        return to_json(await workers.run("resized", request.model_dump()))

    @app.post("/api/curve")
    async def curve(request: CurveRequest) -> Response:
        return to_json(await workers.run("curve", request.model_dump()))

    @app.post("/api/fitting")
    async def fitting(request: FittingRequest) -> Response:
        return to_json(await workers.run("fitting", request.model_dump()))

    @app.post("/api/laws")
    async def laws(request: LawsRequest) -> Response:
        if request.code and not code:
            raise SpecError("this server runs no code of the page; its owner can start it with --allow-code")
        return to_json(await workers.run("laws", request.model_dump()))
