"""A pattern from its text, as it is written in Python; nothing else is evaluated."""

import ast
from inspect import signature

from ..errors import FormatError, RegardError, nearest
from .algebra import KINDS, Pattern
from .grid import neighborhood
from .heads import per_head
from .word import Declared

OPERATIONS = {
    ast.BitAnd: lambda a, b: a & b,
    ast.BitOr: lambda a, b: a | b,
    ast.Sub: lambda a, b: a - b,
}

MORE_WORDS = "neighborhood", "per_head"  # whose arguments are not single numbers
MAX_DEPTH = 100  # levels of nested operators


def parse_pattern(text: str) -> Pattern:
    """A pattern of declared words, `causal() & (window(128) | every(64))`.

    >>> parse_pattern("causal() & (window(2) | every(4))")
    causal() & (window(2) | every(4))
    """
    try:
        return _pattern(ast.parse(text, mode="eval").body)
    except SyntaxError as e:
        where = f"at column {e.offset}" if e.offset else "at its end"
        raise FormatError(f"{text!r:.200} is not a pattern: {e.msg} {where}") from e
    except (RecursionError, MemoryError) as e:  # MemoryError: the stack of Python's parser is full
        raise FormatError(f"a pattern is nested at most {MAX_DEPTH} levels deep") from e
    except ValueError as e:  # null bytes, numbers of thousands of digits
        if isinstance(e, RegardError):
            raise
        raise FormatError(f"{text!r:.200} is not a pattern: {e}") from e


def declared_words() -> dict[str, type[Declared]]:
    """Every word that a text may name, built in or added, by its name."""
    return {name: kind for name, kind in KINDS.items() if issubclass(kind, Declared)}


def _pattern(node: ast.expr, depth: int = 0) -> Pattern:
    words = declared_words()
    if depth > MAX_DEPTH:
        raise FormatError(f"a pattern is nested at most {MAX_DEPTH} levels deep")
    match node:
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_pattern(left, depth + 1), _pattern(right, depth + 1))
        case ast.UnaryOp(ast.Invert(), inner):
            return ~_pattern(inner, depth + 1)
        case ast.Call(ast.Name("per_head"), [ast.List(elements)], []):
            return per_head([_pattern(element, depth + 1) for element in elements])
        case ast.List() | ast.Call(ast.Name("per_head")):
            needed = "a pattern for each query head is written as one list, per_head([causal(), window(2)])"
            raise FormatError(f"{ast.unparse(node)}: {needed}")
        case ast.Call(ast.Name("neighborhood"), arguments, keywords):
            try:
                given = {str(k.arg): ast.literal_eval(k.value) for k in _once(keywords)}
                return neighborhood(*map(ast.literal_eval, arguments), **given)
            except TypeError as e:
                raise _not_arguments_of(neighborhood, node) from e
            except ValueError as e:
                if isinstance(e, RegardError):
                    raise
                raise FormatError(f"{ast.unparse(node)}: {e}") from e
        case ast.Call(ast.Name(word), arguments, keywords):
            if getattr(KINDS.get(word), "has_data", None) is True:  # of others it is a property, or False
                raise FormatError(
                    f"{word} carries data, so it has no text; pass rg.{word}(…) to rg.attention instead"
                )
            if word not in words:
                raise FormatError(f"{word!r} is not a pattern word; {nearest(word, [*words, *MORE_WORDS])}")
            try:
                given = {str(k.arg): _number(k.value, word) for k in _once(keywords)}
                return words[word](*[_number(a, word) for a in arguments], **given)
            except TypeError as e:
                raise _not_arguments_of(words[word], node) from e
        case ast.Name(word) if word in words or word == "neighborhood":
            raise FormatError(f"{word!r} has no brackets; write {_usage(words.get(word, neighborhood))}")
        case ast.Attribute(ast.Name("rg" | "regard"), word) | ast.Call(
            ast.Attribute(ast.Name("rg" | "regard"), word)
        ):
            raise FormatError(f"{ast.unparse(node)!r}: a text names words without a module; write {word}(…)")
    raise FormatError(
        f"{ast.unparse(node)!r} is not a pattern; combine {', '.join([*words, *MORE_WORDS])} with &, |, - and ~"
    )


def _once(keywords: list[ast.keyword]) -> list[ast.keyword]:
    """Python's parser leaves it to the compiler to refuse an argument that is given twice."""
    if len({k.arg for k in keywords}) < len(keywords):
        raise TypeError("keyword argument repeated")
    return keywords


def _usage(word: type[Pattern]) -> str:
    """The word with its arguments: window(before, after=None)."""
    arguments = [str(p.replace(annotation=p.empty)) for p in signature(word).parameters.values()]
    return f"{word.__name__}({', '.join(arguments)})"


def _not_arguments_of(word: type[Pattern], node: ast.expr) -> FormatError:
    return FormatError(f"{ast.unparse(node)}: these are not its arguments; write {_usage(word)}")


def _number(node: ast.expr, word: str) -> int:
    try:
        number = ast.literal_eval(node)
    except ValueError:
        number = None
    if not isinstance(number, int) or isinstance(number, bool):
        raise FormatError(f"{word}({ast.unparse(node)}): a whole number is needed")
    return number
