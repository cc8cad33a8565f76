"""The studio's requests about its model: a summary, heads as data, steps of one head, ablations, generation, runs.

Each route returns the result of a public function; the page shows that Python line. Requests name no file or object.
"""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
from fastapi import FastAPI, Response
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from ..cli.models import LoadedModel, arguments, encoded, has_decoder_input, namer, own_output, vocabulary
from ..costs.entry import cost
from ..errors import FormatError, RegardError, SpecError
from ..lens import ablation
from ..lens.calls import QueryKeyScores
from ..lens.html_report import contents
from ..lens.run_model import first_tensor, run
from ..lens.score_mods import Region
from ..lens.view import View, look
from ..spec import Spec
from ..training.data.tokens import END, START, Tokens
from ..training.loop import log
from .fields import Fields

MAX_TOKENS = 512  # of a text whose heads are shown
MAX_VIEWS = 4  # texts whose calls are in memory
MAP_BYTES = 4_000_000  # of all maps that one answer has
PRICED = 128  # positions of the forward pass whose cost is shown
TOP = 8  # tokens of a distribution that are shown
EXAMPLES = {
    "translate": "You do not have permission to open this file.",
    "text": "The cat sat on the mat because it was tired, and the dog sat on the mat too.",
    "ids": "5, 12, 7, 3, 5, 12, 7, 3, 9, 1",
}


class HeadsRequest(Fields):
    text: str = Field(min_length=1, max_length=4000)
    target: str | None = Field(None, max_length=4000)


class HeadRequest(HeadsRequest):
    """One head of a text; query: a position; key: one that is removed in every layer with the same keys."""

    layer: int | None = Field(None, ge=0, le=10_000)
    head: int | None = Field(None, ge=0, le=10_000)
    query: int = Field(0, ge=0, le=100_000)
    key: int | None = Field(None, ge=0, le=100_000)


class NextRequest(Fields):
    """The text so far: a source, and the ids that follow; of a decoder alone, only these."""

    text: str = Field(min_length=1, max_length=4000)
    after: list[Annotated[int, Field(ge=0, le=2**31)]] = Field(default_factory=list, max_length=MAX_TOKENS)


class BeamRequest(Fields):
    text: str = Field(min_length=1, max_length=4000)
    width: int = Field(4, ge=1, le=8)
    steps: int = Field(24, ge=1, le=64)


class Studio:
    """The model of a server, and the recorded attention of the latest texts."""

    def __init__(self, loaded: LoadedModel, name: str):
        self.loaded, self.name = loaded, name
        self._views: OrderedDict[tuple[str, str | None], View] = OrderedDict()

    # the model

    @property
    def translates(self) -> bool:
        return has_decoder_input(self.loaded)

    @property
    def generates(self) -> bool:
        """Whether its output is a distribution over its own vocabulary."""
        return self._kind in ("translate", "text", "ids") and self._predicts(
            torch.zeros(1, 2, dtype=torch.long)
        )

    @property
    def _kind(self) -> str:
        if self.loaded.tokenizer is None:
            return "ids"
        return "translate" if self.translates else "text"

    def summary(self) -> dict[str, Any]:
        """The name of the model, its parts with their parameters, and an example text."""
        model = self.loaded.model
        parts = _outline(model) if isinstance(model, nn.Module) else []
        total = sum(p.numel() for p in model.parameters()) if isinstance(model, nn.Module) else 0
        config = self.loaded.config
        return {
            "name": self.name,
            "class": type(model).__name__,
            "parameters": total,
            "bytes": sum(p.numel() * p.element_size() for p in model.parameters())
            if isinstance(model, nn.Module)
            else 0,
            "parts": parts,
            "declaration": repr(config) if hasattr(config, "build") else type(config).__name__,
            "python": self.loaded.python,
            "cost": self._price(),
            "reads": "ids" if self.loaded.tokenizer is None else "text",
            "translates": self.translates,
            "generates": self.generates,
            "example": EXAMPLES[self._kind],
        }

    def _price(self) -> dict[str, Any]:
        """The cost of a forward pass over PRICED positions, with its line; for a model without a cost, the reason."""
        model, config = self.loaded.model, self.loaded.config
        line = f"regard.cost(model, n={PRICED})"
        try:
            if isinstance(config, Spec) or hasattr(config, "model_type"):
                found = cost(config if isinstance(config, Spec) else model, n=PRICED)
            else:  # a module of the user's own, on ids as the page sends them
                line = f"regard.cost(model, torch.zeros(1, {PRICED}, dtype=torch.long))"
                found = cost(model, torch.zeros(1, PRICED, dtype=torch.long))
        except RegardError as e:
            return {"n": PRICED, "python": line, "error": str(e)}
        peak = None if found.memory is None else found.memory.inference_peak
        return {"n": PRICED, "python": line, "flops": int(found.total.flops), "peak": peak}

    # heads

    def view(self, text: str, target: str | None = None) -> View:
        """The recorded attention of a text; the last few are cached."""
        key = (text, target)
        if key not in self._views:
            source = torch.tensor([self._ids(text)])
            after = None
            if self.translates:
                after = own_output(self.loaded, source) if not target else self._target(target)
            self._views[key] = look(
                self.loaded.model, arguments(self.loaded, source, after), namer(self.loaded.tokenizer)
            )
            while len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(key)
        return self._views[key]

    def heads(self, request: HeadsRequest) -> dict[str, Any]:
        view = self.view(request.text, request.target)
        return contents(view, budget=MAP_BYTES) | {"next": self._next_of(view), "said": self._said(view)}

    def steps(self, request: HeadRequest) -> dict[str, Any]:
        """Every number of one row of one head, in the order of the formula."""
        view = self.view(request.text, request.target)
        call = view.call(request.layer or 0)
        head, query = request.head or 0, request.query
        if head >= call.heads or query >= call.n:
            raise SpecError(f"layer {call.layer} has {call.heads} heads and {call.n} queries")
        source = call.source
        weights = call.weights([head], [query], 0)[0, 0]
        answer: dict[str, Any] = {
            "query": call.queries[0][query],
            "keys": list(call.keys[0]),
            "weights": _numbers(weights),
        }
        if source is not None and source.v is not None:
            v = source.v[0, head * source.v.shape[1] // call.heads].float()
            answer |= {"v": [_numbers(row[:8]) for row in v], "output": _numbers((weights.to(v) @ v)[:8])}
        if isinstance(source, QueryKeyScores) and 0 < source.scale < float("inf"):
            q = source.q[0, head, query].float()
            k = source.k[0, head * source.k.shape[1] // call.heads].float()
            region = Region(0, [head], slice(query, query + 1), call.m)
            scores = source.scores(region)[0, 0]
            top = float(scores.max())
            answer |= {
                "q": _numbers(q[:8]),
                "k": [_numbers(row[:8]) for row in k],
                "products": _numbers(k @ q),
                "scale": source.scale,
                "scaled": _numbers(source.scale * (k @ q)),
                "scores": [None if s == float("-inf") else round(s, 5) for s in scores.tolist()],
                "top": round(top, 5),
                "exp": _numbers((scores - top).exp()),
                "sum": round(float((scores - top).exp().sum()), 5),
                "d_k": source.q.shape[-1],
            }
        return answer

    def remove(self, request: HeadRequest) -> dict[str, Any]:
        """The change of the output and of the predicted next token without a head, or without a key."""
        view = self.view(request.text, request.target)
        model, inputs = self.loaded.model, view._inputs
        if request.key is not None:
            keys = view.keys(request.layer or 0)
            if request.key >= len(keys):
                raise SpecError(f"key {request.key}: layer {request.layer or 0} has {len(keys)} keys")
            layers = [c.layer for c in view.calls if c.keys[0] == keys]
            change: Any = ablation._without_key_of(request.key, layers, None)
        elif request.layer is not None and request.head is not None:
            change = ablation._without_head_of(request.layer, request.head)
        else:
            raise SpecError("nothing to remove: give a layer and a head, or a key")
        before, after = ablation.unchanged(model, inputs), ablation._run(model, inputs, change)
        return {
            "effect": ablation._difference(before, after, None),
            "before": self._distribution(first_tensor(before)),
            "after": self._distribution(first_tensor(after)),
        }

    # generation

    def next(self, request: NextRequest) -> dict[str, Any]:
        """The distribution of the next token after a text, and the attention of the last position."""
        source = torch.tensor([self._ids(request.text)])
        if self.translates:
            after = torch.tensor([[self._start(), *request.after]])
            inputs, keys = arguments(self.loaded, source, after), source
        else:
            joined = torch.tensor([[*source[0].tolist(), *request.after]])
            if joined.shape[1] > MAX_TOKENS:
                raise SpecError(f"the text has reached {MAX_TOKENS} tokens")
            inputs, keys = arguments(self.loaded, joined, None), joined
        with torch.no_grad():
            out = first_tensor(run(self.loaded.model, inputs))
        if out.shape[-1] != vocabulary(self.loaded):
            raise SpecError(f"{self.name} has no language head, so it predicts no tokens")
        view = look(self.loaded.model, inputs, namer(self.loaded.tokenizer))
        role = "cross" if self.translates else "self"
        layers = [c for c in view.calls if c.role == role]
        attended = [c.weights(None, [c.n - 1], 0)[:, 0].mean(0)[: keys.shape[1]] for c in layers]
        return {
            "top": self._distribution(out),
            "keys": self._words(keys[0].tolist()),
            "attention": [_numbers(row, 4) for row in attended],
            "end": self._end(),
        }

    def beams(self, request: BeamRequest) -> dict[str, Any]:
        """Every hypothesis that a beam search of this width keeps or drops, as a tree of tokens."""
        if not self.translates:
            raise SpecError("a beam tree is shown for translators")
        source = torch.tensor([self._ids(request.text)])
        end = self._end()
        nodes: list[dict[str, Any]] = []
        beams: list[tuple[float, list[int], int]] = [(0.0, [self._start()], -1)]  # score, ids, last node
        finished: list[tuple[float, int]] = []
        for depth in range(request.steps):
            rows = torch.tensor([ids for _, ids, _ in beams])
            with torch.no_grad():
                logits = first_tensor(
                    run(self.loaded.model, arguments(self.loaded, source.expand(len(rows), -1), rows))
                )
            scores = logits[:, -1].float().log_softmax(-1)
            found = []
            for (score, ids, last), row in zip(beams, scores):
                for gain, token in zip(*(x.tolist() for x in row.topk(request.width))):
                    found.append((score + gain, [*ids, token], last))
            found.sort(key=lambda each: -each[0])
            beams = []
            for rank, (score, ids, last) in enumerate(found[: 2 * request.width]):
                kept = len(beams) < request.width and rank < 2 * request.width
                node = {"parent": last, "depth": depth, "score": round(score, 3), "kept": kept}
                nodes.append(node | {"token": self._words([ids[-1]])[0], "end": ids[-1] == end})
                if not kept:
                    continue
                if ids[-1] == end:
                    finished.append((score / (((5 + len(ids)) / 6) ** 0.6), len(nodes) - 1))
                else:
                    beams.append((score, ids, len(nodes) - 1))
            if not beams or len(finished) >= request.width:
                break
        best = max(finished)[1] if finished else (beams[0][2] if beams else -1)
        return {"nodes": nodes, "best": best}

    # details

    def _ids(self, text: str) -> list[int]:
        from .app import _ids

        ids = _ids(text, self.loaded)
        if not ids:
            raise FormatError("this text has no tokens")
        if len(ids) > MAX_TOKENS:
            raise SpecError(f"{len(ids)} tokens are too many to show; the limit is {MAX_TOKENS}")
        return ids

    def _target(self, text: str) -> Tensor:
        if self.loaded.tokenizer is None:
            return torch.tensor([self._ids(text)])
        return torch.tensor([[self._start(), *encoded(text, self.loaded.tokenizer)]])

    def _start(self) -> int:
        if isinstance(self.loaded.tokenizer, Tokens) or not hasattr(self.loaded.config, "model_type"):
            return START
        return int(self.loaded.config.decoder_start_token_id or 0)

    def _end(self) -> int | None:
        if isinstance(self.loaded.tokenizer, Tokens):
            return END
        return getattr(self.loaded.config, "eos_token_id", None)

    def _words(self, ids: list[int]) -> list[str]:
        from ..cli.models import token_names

        return [str(word) for word in token_names(self.loaded.tokenizer, ids)]

    def _predicts(self, ids: Tensor) -> bool:
        try:
            after = torch.full((1, 1), self._start()) if self.translates else None
            with torch.no_grad():
                out = first_tensor(run(self.loaded.model, arguments(self.loaded, ids, after)))
            return out.ndim == 3 and out.shape[-1] == vocabulary(self.loaded)
        except (RegardError, ValueError, RuntimeError):
            return False

    def _said(self, view: View) -> str | None:
        """The decoder's input as text: for an encoder-decoder, its own translation."""
        if not self.translates:
            return None
        inputs = view._inputs
        ids = (inputs["decoder_input_ids"] if isinstance(inputs, dict) else inputs[1])[0].tolist()
        tokenizer = self.loaded.tokenizer
        if isinstance(tokenizer, Tokens):
            return tokenizer.decode([ids])[0]
        if hasattr(tokenizer, "decode"):
            return tokenizer.decode(ids, skip_special_tokens=True)
        return ", ".join(map(str, ids))

    def _next_of(self, view: View) -> list[dict[str, Any]] | None:
        with torch.no_grad():
            return self._distribution(first_tensor(run(self.loaded.model, view._inputs)))

    def _distribution(self, out: Float[Tensor, "..."]) -> list[dict[str, Any]] | None:
        """The most probable next tokens after the last position; None for a model without a language head."""
        if out.ndim != 3 or out.shape[-1] != vocabulary(self.loaded):
            return None
        p, ids = out[0, -1].float().softmax(-1).topk(TOP)
        return [
            {"id": i, "token": word, "p": round(x, 5), "end": i == self._end()}
            for i, word, x in zip(ids.tolist(), self._words(ids.tolist()), p.tolist())
        ]


def _numbers(x: Tensor, digits: int = 5) -> list[float]:
    return [round(value, digits) for value in x.float().tolist()]


def _outline(model: nn.Module, depth: int = 4, seen: set[int] | None = None) -> list[dict[str, Any]]:
    """The parts of a model with their parameters; equal neighbors are folded into one with a count.

    shared: parameters that an earlier part has too, such as an embedding that serves two stacks.
    """
    seen = set() if seen is None else seen
    parts: list[dict[str, Any]] = []
    for name, child in model.named_children():
        parameters = {id(p): p.numel() for p in child.parameters()}
        inner = _outline(child, depth - 1, set(seen)) if depth > 1 else []
        shared = sum(size for key, size in parameters.items() if key in seen)
        seen |= set(parameters)
        part: dict[str, Any] = {"name": name, "class": type(child).__name__, "times": 1, "parts": inner}
        part |= {"parameters": sum(parameters.values()), "shared": shared}
        if (
            isinstance(child, nn.ModuleList) and len(inner) == 1
        ):  # a list of equal blocks is shown as one block with a count
            part |= {key: inner[0][key] for key in ("class", "times", "parts")}
            part["parameters"] //= part["times"]
            part["shared"] //= part["times"]
        last = parts[-1] if parts else None
        if last is not None and _equal(last, part):
            last["times"] += 1
        else:
            parts.append(part)
    return parts


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = all(a[key] == b[key] for key in ("class", "parameters", "shared"))
    return same and a["name"].isdecimal()


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """The training curves of each run in a folder."""
    runs = []
    for home in sorted(p.parent for p in folder.glob("*/log.jsonl")):
        events = log.read(home)
        curves = {
            "loss": [(e["step"], e["loss"]) for e in events if e["event"] == "train"],
            "validation loss": [(e["step"], e["loss"]) for e in events if e["event"] == "valid"],
            "tokens/s": [(e["step"], e["tokens_per_second"]) for e in events if e["event"] == "train"],
        }
        finite = {name: [p for p in points if not isinstance(p[1], str)] for name, points in curves.items()}
        state = "finished" if any(e["event"] == "done" for e in events) else "unfinished"
        runs.append(
            {
                "name": home.name,
                "folder": f"{folder.name}/{home.name}",
                "state": state,
                "curves": finite,
                "events": len(events),
            }
        )
    return runs


def add_routes(
    app: FastAPI,
    studio: Studio | None,
    exclusively: Callable[[Callable[[], Any]], Any],
    to_json: Callable[[Any], Response],
    runs: Path | None,
) -> None:
    """The studio's routes; exclusively: runs a function of the model for one request at a time."""

    def answer(act: Callable[[Studio], Any]) -> Response:
        if studio is None:
            raise SpecError("this page was started without a model; use `regard serve MODEL`")
        return to_json(exclusively(lambda: act(studio)))

    @app.get("/api/model")
    def model() -> Response:
        return answer(lambda s: s.summary())

    @app.post("/api/heads")
    def heads(request: HeadsRequest) -> Response:
        return answer(lambda s: s.heads(request))

    @app.post("/api/steps")
    def steps(request: HeadRequest) -> Response:
        return answer(lambda s: s.steps(request))

    @app.post("/api/remove")
    def remove(request: HeadRequest) -> Response:
        return answer(lambda s: s.remove(request))

    @app.post("/api/next")
    def following(request: NextRequest) -> Response:
        return answer(lambda s: s.next(request))

    @app.post("/api/beams")
    def beams(request: BeamRequest) -> Response:
        return answer(lambda s: s.beams(request))

    @app.get("/api/runs")
    def all_runs() -> Response:
        return to_json([] if runs is None else read_runs(runs))
