"""Classifying heads: their statistics against a table of thresholds."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan, nan

from ..errors import RegardError
from .statistics import HeadStatistics


@dataclass(frozen=True)
class HeadKind:
    """A name, a confidence (½ at the threshold, 1 for a head that does nothing else), and the evidence as text."""

    name: str
    confidence: float
    evidence: str


@dataclass(frozen=True)
class Rule:
    """A head is of this kind if `measure` is at least `threshold`. `evidence` is formatted with the numbers.

    The rules of a tier apply only if no rule of an earlier tier holds: positions, then shapes, then the rest.
    """

    name: str
    measure: str  # a name of MEASURES
    threshold: float
    evidence: str
    tier: int = 0


RULES = (
    Rule("self", "on_self", 0.4, "{value:.0%} of the weight is on the query itself"),
    Rule("previous", "on_previous", 0.4, "{value:.0%} is on the token before"),
    Rule("next", "on_next", 0.4, "{value:.0%} is on the token after"),
    Rule("shift", "shift", 0.4, "{value:.0%} is at one offset, {where}"),
    Rule("first", "on_first", 0.4, "{value:.0%} is on the first token"),
    Rule("induction", "induction", 0.35, "{value:.0%} is on what followed the same token before"),
    Rule("same token", "on_same", 0.35, "{value:.0%} is on other occurrences of the same token"),
    Rule("separator", "on_separator", 0.5, "{value:.0%} is on separators"),
    Rule("sink", "one_key", 0.4, "{value:.0%} of all queries' weight is on one key, {where}"),
    Rule(
        "agreement",
        "agreement",
        0.4,
        "{value:.0%} of the marked queries' weight is on the word they agree with",
    ),
    Rule(
        "coreference",
        "coreference",
        0.4,
        "{value:.0%} of the marked queries' weight is on what they refer to",
    ),
    Rule("stride", "stride", 0.6, "{value:.0%} is on keys {where}", 1),
    Rule("window", "near", 0.6, "90 % of the weight is at most {where} away", 1),
    Rule("uniform", "flat", 0.95, "its entropy is {value:.0%} of the maximum", 1),
    Rule("content", "sharp", 0.4, "its entropy is {where} of the maximum, at no fixed position", 2),
)
KINDS = (*(rule.name for rule in RULES), "mixed")


def classify_head(s: HeadStatistics, head: int, rules: tuple[Rule, ...] = RULES) -> HeadKind:
    """The kind whose threshold is exceeded by the largest margin, in the first tier that has one; ties go to the
    earlier rule."""
    best: tuple[float, HeadKind] | None = None
    tier = 0
    for rule in sorted(rules, key=lambda r: r.tier):
        if rule.tier > tier and best is not None:
            break
        tier = rule.tier
        if rule.measure not in MEASURES:
            raise RegardError(
                f"{rule!r}: unknown measure {rule.measure!r}; known: {', '.join(sorted(MEASURES))}"
            )
        value, where, shown = MEASURES[rule.measure](s, head)
        if isnan(value) or value < rule.threshold:
            continue
        margin = (value - rule.threshold) / max(1 - rule.threshold, 1e-9)
        result = HeadKind(
            rule.name, min(0.5 + margin / 2, 1.0), rule.evidence.format(value=shown, where=where)
        )
        if best is None or margin > best[0] + 1e-9:
            best = margin, result
    if best is not None:
        return best[1]
    return HeadKind("mixed", 0.5, f"{float(s.keys[head]):.1f} effective keys; no threshold is reached")


def classify_heads(s: HeadStatistics, rules: tuple[Rule, ...] = RULES) -> tuple[HeadKind, ...]:
    """The kind of every head."""
    return tuple(classify_head(s, h, rules) for h in range(len(s.entropy)))


# A measure gives the number to compare with the threshold (corrected for chance), a text for the evidence, and the
# number before the correction.
Measured = tuple[float, str, float]
Measure = Callable[[HeadStatistics, int], Measured]


def _above_chance(value: float, chance: float) -> float:
    """The value relative to chance: 0 for that of a uniform head, 1 for all of the weight."""
    return (value - chance) / max(1 - chance, 1e-9)


def _on(name: str) -> Measure:
    def measure(s: HeadStatistics, h: int) -> Measured:
        value = float(getattr(s, name)[h])
        return _above_chance(value, s.uniform.get("one_key", 0.0)), "", value

    return measure


def _related(name: str) -> Measure:
    """The weight on the related keys; only where View.mark was given this relation."""

    def measure(s: HeadStatistics, h: int) -> Measured:
        value = float(s.relations[name][h]) if name in s.relations else nan
        return _above_chance(value, s.uniform.get("one_key", 0.0)), "", value

    return measure


def _shift(s: HeadStatistics, h: int) -> Measured:
    """The offset with the largest weight, in one dimension or, on a grid, in two."""
    offset, value = int(s.shift[h]), float(s.shift_weight[h])
    if s.grid is not None and float(s.grid.shift_weight[h]) > value:
        (y, x), value = s.grid.shift[h].tolist(), float(s.grid.shift_weight[h])
        return _above_chance(value, s.uniform["one_key"]), f"{y:+.0f} rows and {x:+.0f} columns", value
    where = "the query itself" if offset == 0 else f"{abs(offset)} {'back' if offset > 0 else 'ahead'}"
    rare = len(s.offsets) > 2 and abs(offset) > max(abs(int(s.offsets[0])), abs(int(s.offsets[-1]))) / 2
    return (
        (0.0 if rare else _above_chance(value, s.uniform["one_key"])),  # few queries have a key so far away
        where,
        value,
    )


def _one_key(s: HeadStatistics, h: int) -> Measured:
    value, j = s.by_key[h].max(-1)
    return _above_chance(float(value), s.uniform["one_key"]), f"key {int(j)}", float(value)


def _stride(s: HeadStatistics, h: int) -> Measured:
    """The k with the largest weight above its share 1/k, on keys or on offsets."""
    candidates = [(0.0, "", 0.0)]
    for table, text in ((s.multiples, "j ≡ 0 mod {k}"), (s.strides, "with i − j ≡ 0 mod {k}")):
        for k, each in table.items():
            value = float(each[h])
            at_zero = float(s.by_key[h, 0]) if table is s.multiples else float(s.on_self[h])
            single = (
                0.0 if isnan(at_zero) else at_zero
            )  # a head with all weight on one multiple is another kind
            candidates.append((_above_chance(value, 1 / k) - single, text.format(k=k), value))
    return max(candidates)


def _near(s: HeadStatistics, h: int) -> Measured:
    span, uniform = float(s.span[h]), s.uniform["span"]
    value = 1 - span / uniform if uniform > 0 else 0.0
    return value, f"{span:.0f}", value


def _flat(s: HeadStatistics, h: int) -> Measured:
    value = float(s.entropy_share[h])
    return value, "", value


def _sharp(s: HeadStatistics, h: int) -> Measured:
    used = float(s.entropy_share[h])
    return 1 - used, f"{used:.0%}", 1 - used


MEASURES: dict[str, Measure] = {
    **{
        name: _on(name)
        for name in ("on_self", "on_previous", "on_next", "on_first", "on_same", "on_separator", "induction")
    },
    "agreement": _related("agreement"),
    "coreference": _related("coreference"),
    "shift": _shift,
    "one_key": _one_key,
    "stride": _stride,
    "near": _near,
    "flat": _flat,
    "sharp": _sharp,
}
