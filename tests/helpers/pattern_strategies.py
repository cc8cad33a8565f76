"""Random patterns for Hypothesis: words with small numbers, combined by `&`, `|`, `~` and `-`."""

from hypothesis import strategies as st

from regard.pattern import (
    Pattern,
    blocks,
    causal,
    dilated,
    every,
    full,
    prefix,
    rows,
    sinks,
    strided,
    window,
)

small, counts = st.integers(0, 6), st.integers(1, 6)
residues = counts.flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k - 1)))

words: st.SearchStrategy[Pattern] = st.one_of(
    st.builds(full),
    st.builds(causal),
    st.builds(window, small, st.none() | small),
    st.builds(dilated, small, counts),
    residues.map(lambda r: every(*r)),
    st.builds(strided, counts),
    residues.map(lambda r: rows(*r)),
    st.builds(sinks, small),
    st.builds(prefix, small),
    st.builds(blocks, counts),
)


def _joined(inner: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
    two = st.tuples(inner, inner)
    return st.one_of(
        two.map(lambda t: t[0] & t[1]),
        two.map(lambda t: t[0] | t[1]),
        two.map(lambda t: t[0] - t[1]),
        inner.map(lambda p: ~p),
    )


patterns = st.recursive(words, _joined, max_leaves=5)

# the query offset: after a cache, an integer, or (start, step)
offsets = st.one_of(st.none(), st.integers(-5, 15), st.tuples(st.integers(-5, 15), st.integers(1, 5)))
