"""The cost of a model as a value, conclusions from it (savings, the bottleneck, orders of products), its table."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import SpecError
from ..formulas import RelativeOrders, ScoreOrders, latex_table, leading_order, relative_orders, score_orders
from ..machine import readable, short
from ..position import quadratic
from ..spec import Attention, FeedForward, Spec
from ..spec.attention import BIASES
from ..table import ShownAsTables, Table
from .flops.models import build_tree
from .sizes import Symbols
from .trace.tracer import merged
from .tree import Amount, Amounts, Pairs, Part

CONVENTION = (
    "a multiply-add is 2 FLOPs; FLOPs are those of matrix products; "
    "a softmax over m entries is 5m − 2 elementwise FLOPs"
)
CORE = ("scores", "mixing")
PROJECTIONS = ("q", "k", "v", "output", "w_q", "w_k")


class Saving(NamedTuple):
    """The share of FLOPs that the patterns save compared with full attention."""

    core: float  # of scores and mixing, by the pairs that the pattern allows
    total: float  # of the whole model: a pattern does not change projections
    core_executed: float  # by the pairs that the backend evaluates: a mask alone saves nothing
    total_executed: float

    def __str__(self) -> str:
        return (
            f"the pattern saves {self.core:.4%} of the FLOPs of scores and mixing, {self.total:.4%} of the total; "
            f"with this backend {self.core_executed:.4%} and {self.total_executed:.4%}"
        )


class Bottleneck(NamedTuple):
    """The kind of work with the most FLOPs, and its arithmetic intensity."""

    part: str  # projections, core, feed-forward, head or rest
    share: float  # of the FLOPs
    flops: Amount
    bytes: Amount
    why: str

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP/byte: if it is below the machine balance, memory bandwidth is the limit."""
        return self.flops / self.bytes if self.bytes else float("inf")

    def limit(self, balance: float) -> str:
        """`compute` or `memory`, on a machine with this balance: peak FLOP/s divided by bytes/s."""
        return "compute" if self.intensity >= balance else "memory"

    def __str__(self) -> str:
        return (
            f"bottleneck: {self.part}, {self.share:.1%} of the FLOPs ({self.why}); "
            f"arithmetic intensity {self.intensity:.1f} FLOP/byte"
        )


@dataclass(frozen=True, repr=False)
class Cost(ShownAsTables):
    """The cost of a model. `print` it for a table; `total`, `tree` and `json()` are for programs."""

    name: str  # what was priced
    sizes: dict[str, Any]  # n, m, batch, dtype, …: the sizes that the numbers hold for
    tree: Part
    pairs: tuple[Pairs, ...] = ()
    uncounted: tuple[str, ...] = ()  # operations of a traced module that no amount includes
    notes: tuple[str, ...] = ()  # assumptions of a trace
    request: Any = field(default=None, compare=False)  # the declaration and its sizes; None if traced
    remember: Callable[[], Any] | None = field(default=None, compare=False)  # computes `memory`
    # (budget in bytes, "batch" or "n") → the largest that fits; None if traced at one size.
    fitting: Callable[[int, str], int] | None = field(default=None, compare=False)

    total = property(lambda self: self.tree.total)
    parameters, flops, backward_flops, elementwise_flops, executed_flops, executed_backward_flops, bytes = (
        property(lambda self, name=f.name: getattr(self.total, name), doc=f"`total.{f.name}`")
        for f in fields(Amounts)
    )

    def __getitem__(self, path: str) -> Part:
        return self.tree[path]

    @cached_property
    def memory(self) -> Any:
        """regard.costs.Memory, in bytes, computed at the first use; None for a declaration without a width."""
        return None if self.remember is None else self.remember()

    def explain_peak(self) -> str:
        """Where the peak is, what is alive there, and what would lower it, in words."""
        if self.memory is None:
            raise SpecError(f"the memory of {self.name} is not known")
        return self.memory.explain_peak()

    def fits(self, budget: int, vary: str = "batch") -> int:
        """The largest batch (or n, with `vary="n"`) whose peak memory is at most `budget` bytes; 0 if none fits."""
        if self.fitting is None:
            raise SpecError(f"{self.name} was traced at one size; declare a spec to find what fits")
        return self.fitting(budget, vary)

    @cached_property
    def _formulas(self) -> tuple[Part, dict[Any, int]]:
        if self.request is None:
            raise SpecError(
                f"the cost of {self.name} was traced, which gives numbers only; declare a spec to get a formula"
            )
        symbols = Symbols()
        return build_tree(self.request, symbols)[0], symbols.values

    symbolic = property(lambda c: c._formulas[0], doc="the tree with a formula for each amount; needs sympy")
    values = property(lambda c: c._formulas[1], doc="of the symbols: `formula.subs(values)` is the number")
    order = property(lambda c: leading_order(c.formula), doc="monomials of the FLOPs that no other dominates")

    @property
    def formula(self) -> Any:
        """FLOPs of the forward pass as a sympy expression; `symbolic` has the formulas of all amounts."""
        flops = self.symbolic.total.flops
        return flops if isinstance(flops, int) else flops.expand()

    @property
    def latex(self) -> str:
        """A LaTeX array of formulas, term by term, and their sums: parameters, FLOPs, elementwise FLOPs."""
        head = ("term", "parameters", "FLOPs", "elementwise FLOPs")
        rows = [(name, a.parameters, a.flops, a.elementwise_flops) for name, a in self.symbolic.terms()]
        a = self.symbolic.total
        return latex_table(head, rows, (a.parameters, a.flops, a.elementwise_flops))

    @cached_property
    def biases(self) -> dict[str, int] | None:
        """Parameters with no biases, with the output bias of attention only, and with all; None if traced."""
        if self.request is None:
            return None
        variants = {word: _with_biases(self.request.spec, word) for word in BIASES}
        return {word: self._tree(spec=spec).total.parameters for word, spec in variants.items()}

    def _tree(self, **changed: Any) -> Part:
        return build_tree(replace(self.request, **changed))[0]

    @cached_property
    def saving(self) -> Saving | None:
        """The share of FLOPs that the patterns save, in the attention core and in total; None if traced."""
        if self.request is None:
            return None
        dense = self._tree(dense=True)
        core, total, rest = core_of(self.tree), self.total.flops, self.total.flops - core_of(self.tree).flops
        now = core.flops, total, core.executed_flops, core.executed_flops + rest
        before = (core_of(dense).flops, dense.total.flops) * 2
        return Saving(*(1 - a / b if b else 0.0 for a, b in zip(now, before)))

    @property
    def bottleneck(self) -> Bottleneck | None:
        """The kind of work with the most FLOPs, and why; None if there are no matrix products."""
        kinds: dict[str, Amounts] = {}
        for path, amounts in self.tree.terms():
            kind = _kind_of(path, traced=self.request is None)
            kinds[kind] = kinds.get(kind, Amounts()) + amounts
        if not self.total.executed_flops:
            return None
        part = max(kinds, key=lambda kind: kinds[kind].executed_flops)
        flops, all_flops = kinds[part].executed_flops, self.total.executed_flops
        why = _why(part, kinds, 2 * flops > all_flops)
        return Bottleneck(part, flops / all_flops, flops, kinds[part].bytes, why)

    @property
    def score_orders(self) -> ScoreOrders | None:
        """FLOPs of the scores of a declared attention in three orders of the same products; else None."""
        match self.request and self.request.spec:
            case Attention(score="dot", sizes=s) if s.d_context == s.d_model:
                return score_orders(self.request.n, self.request.m, s.d_model, s.heads, s.d_k)
        return None

    @property
    def position_orders(self) -> RelativeOrders | None:
        """FLOPs of the scores of a declared quadratic position, per pair and per distinct offset; else None.

        ‖δ‖² and δ: d_p is 2 on a line, 3 on a grid.
        """
        match self.request and self.request.spec:
            case Attention(position=quadratic(grid=grid, axes=axes), sizes=s):
                offsets = None if grid is None else (2 * grid[0] - 1) * (2 * grid[1] - 1)
                n, m = self.request.n, self.request.m
                return relative_orders(n, m, axes + 1, s.heads * s.d_k, s.heads, offsets)
        return None

    def plain(self) -> dict[str, Any]:
        """The cost as dictionaries, lists, numbers and strings."""
        names = ("saving", "score_orders", "position_orders", "bottleneck")
        conclusions = {name: getattr(self, name) for name in names}
        return {
            "name": self.name,
            "sizes": {k: v if isinstance(v, int | float | str) else str(v) for k, v in self.sizes.items()},
            "convention": CONVENTION,
            "total": self.total.plain(),
            "biases": self.biases,
            "pairs": [p.plain() for p in self.pairs],
            **{name: None if c is None else c._asdict() for name, c in conclusions.items()},
            "memory": None if self.memory is None else self.memory.plain(),
            "uncounted": list(self.uncounted),
            "notes": list(self.notes),
            "tree": self.tree.plain(),
        }

    def table(self, depth: int | None = None) -> Table:
        """The tree to this depth, in amounts of the whole model: `.text()`, `.rich()` or `.html()`."""
        total, train, traced, lines = self.total, self.sizes.get("train"), self.request is None, []
        wanted = {
            "parameters": True,
            "flops": True,
            "executed_flops": total.executed_flops != total.flops,
            "backward_flops": train,
            "executed_backward_flops": train and total.executed_backward_flops != total.backward_flops,
            "elementwise_flops": total.elementwise_flops,
        }
        columns = [name for name in wanted if wanted[name]]
        for path, part, times in self.tree.nodes():
            # The operations of a traced module are left out, but for attention: they would double the table.
            at, term = path.count("/") + 1 if path else 0, not part.parts and not part.own.parameters
            operation = traced and path and term and "attention" not in part.name
            if operation or (depth is not None and at > depth):
                continue
            amounts = part.total * times
            numbers = (getattr(amounts, name) for name in columns)
            cells = ("" if x == 0 else f"{x:,}" if isinstance(x, int) else str(x) for x in numbers)
            share = f"{amounts.flops / total.flops:.1%}" if total.flops and amounts.flops else ""
            name = part.name if part.times == 1 else f"{part.name} × {part.times}"
            lines.append(("  " * at + name, *cells, share, f"({part.note})" if part.note else ""))
        headings = (c.removesuffix("_flops").replace("flops", "FLOPs").replace("_", " ") for c in columns)
        sizes = ", ".join(k if v is True else f"{k} = {v}" for k, v in self.sizes.items() if v is not False)
        name = self.name if len(self.name) <= 100 else self.name[:97] + "…"
        above = f"{name}\n{sizes}" + (f"\n{self._summary()}" if self.sizes else "")
        return Table(above, ("", *headings, "share", ""), lines, tuple(self._remarks()))

    def _summary(self) -> str:
        """Parameters, FLOPs and peak memory, in one line."""
        words = [f"{short(self.parameters)} parameters", f"{short(self.flops)}FLOP"]
        if self.sizes.get("train"):
            words[-1] += f" forward, {short(self.total.backward_flops)}FLOP backward"
        if self._shows_memory:
            peak, kind = self.memory.usage.peak, "training" if self.memory.trains else "inference"
            words.append(f"{kind} peak {readable(peak)} (weights {readable(self.memory.weights)})")
        return ", ".join(words)

    @property
    def _shows_memory(self) -> bool:
        """Whether memory was computed or a training step was requested: a trace takes longer than the formulas."""
        wanted = self.sizes.get("train") or "memory" in vars(self) or self.request is None
        return bool(wanted) and self.memory is not None

    def _remarks(self) -> list[str]:
        """The lines below the table: biases, pairs, savings, orders of products, bottleneck, memory, convention."""
        lines, counts = [], self.biases or {}
        if len(set(counts.values())) > 1:
            lines.append(
                f"parameters: {counts['none']:,} without biases, {counts['output']:,} with output biases only, "
                f"{counts['all']:,} with all biases"
            )
        attentions = Counter(  # equal attentions of several layers are one line
            f"pairs in {merged(p.path)}{p.of_heads}: {p.pattern} allows {p.needed:,} of {p.full:,}; "
            f"backend {p.backend} computes {p.computed:,} ({p.waste:.2f} × needed)"
            for p in self.pairs
        )
        lines += [line if times == 1 else f"{line}, {times} times" for line, times in attentions.items()]
        if self.saving is not None and self.saving.core:
            lines.append(str(self.saving))
        if (orders := self.score_orders) is not None:
            lines.append(
                f"FLOPs of all scores: {orders.projected:,} if each vector is projected once; {orders.merged_qk:,} "
                f"with W_q W_kᵀ merged; {orders.naive:,} if each pair projects its vectors"
            )
        if (relative := self.position_orders) is not None:
            lines.append(
                f"FLOPs of position scores: {relative.per_pair:,} if computed for each pair; "
                f"{relative.per_offset:,} for each of {relative.offsets:,} distinct offsets"
            )
        if (bottleneck := self.bottleneck) is not None:
            lines.append(str(bottleneck))
        if self._shows_memory:
            width = max(len(name) for name, _ in self.memory.rows())
            for name, size in self.memory.rows():
                text = size if isinstance(size, str) else f"{size:>18,} bytes  {readable(size):>12}"
                lines.append(f"memory  {name:<{width}}  {text}")
            lines.append(self.explain_peak())
        elif self.request is not None:
            lines.append("memory  peaks are computed on request: cost.memory")
        lines += [f"not counted: {name}" for name in self.uncounted]
        return [*lines, *(f"assumed: {note}" for note in self.notes), CONVENTION]

    def __repr__(self) -> str:
        return f"<Cost of {self.name[:60]}: {self._summary()}>"


def core_of(tree: Part) -> Amounts:
    """Scores and mixing of all attentions."""
    return sum((a for path, a in tree.terms() if path.rpartition("/")[2] in CORE), Amounts())


def _with_biases(spec: Any, biases: str) -> Any:
    """The same declaration with biases in no linear map, in the output of attention only, or in all.

    Attention and feed-forward change; norms, patches and heads keep their declaration.
    """
    match spec:
        case Attention():
            return replace(spec, biases=biases)
        case FeedForward():
            return replace(spec, bias=biases == "all")
    inside = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return replace(spec, **{k: _with_biases(s, biases) for k, s in inside.items() if isinstance(s, Spec)})


def _kind_of(path: str, traced: bool) -> str:
    """The kind of work of a term; of a traced one the path of the module around its module, up to a numbered one."""
    inside, _, last = path.rpartition("/")
    around = inside.rpartition("/")[0]
    if traced:
        numbered = around.rpartition("/")[2][:1].isdigit()
        return "core" if "attention" in last else merged(inside if numbered else around or inside) or last
    if "feed_forward/" in path:
        return "feed-forward"
    if "head/" in path or last in ("head", "logits"):
        return "head"
    return "core" if last in CORE else "projections" if last in PROJECTIONS else "rest"


def _why(part: str, kinds: dict[str, Amounts], most: bool) -> str:
    """most: whether it is more than half of the FLOPs."""
    core, projections = (kinds.get(k, Amounts()).executed_flops for k in ("core", "projections"))
    if part == "core" and projections:
        return f"pairs grow as n·m, projections as n + m: here {core / projections:.1f} times the projections"
    if part == "projections" and core:
        return f"few pairs for this width: {projections / core:.1f} times the attention core"
    if part == "head" and most:
        return "the vocabulary is larger than all layers together"
    return "its matrices are the widest" if part == "feed-forward" else "more than any other part"
