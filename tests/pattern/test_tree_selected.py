"""Patterns of trees and of listed blocks: their pairs, blocks, counts and errors."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import regard as rg
from regard.errors import ShapeError
from regard.pattern import BlockGrid, classify


def random_tree(m, seed, roots=0.1):
    random = np.random.default_rng(seed)
    parents = [
        -1 if i == 0 or random.random() < roots else int(random.integers(max(0, i - 9), i)) for i in range(m)
    ]
    return torch.tensor(parents)


def ancestors(parents):
    """The table by its meaning: climb from each position to its root."""
    table = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for i in range(len(parents)):
        j = i
        while j >= 0:
            table[i, j] = True
            j = int(parents[j])
    return table


@pytest.mark.parametrize("seed", range(4))
def test_a_position_attends_to_itself_and_its_ancestors(seed):
    parents = random_tree(60, seed)
    pattern, right = rg.tree(parents), ancestors(parents)
    assert torch.equal(pattern.allowed(60), right)
    assert pattern.count(60) == int(right.sum())
    assert torch.equal(pattern.allowed(10, 60, at=50), right[50:])
    assert not pattern.allowed(3, 60, at=60).any()
    assert all(pattern.allows(i, j) == bool(right[i, j]) for i in range(0, 60, 7) for j in range(0, 60, 5))
    mask = pattern.row_mask(inside=False)
    i = torch.arange(-3, 70)[:, None]
    assert torch.equal(mask(0, i, torch.arange(60))[3:63], right)
    assert not mask(0, i, torch.arange(60))[:3].any() and not mask(0, i, torch.arange(60))[63:].any()


def test_a_tree_without_nodes_has_no_pairs():
    none = rg.tree(torch.zeros(2, 0, dtype=torch.long))
    assert none.allowed(0, 0).numel() == 0
    assert rg.attention(*torch.zeros(3, 2, 1, 0, 4).unbind(), none).shape == (2, 1, 0, 4)


def test_no_queries_need_no_listed_blocks_wherever_they_begin():
    listed = rg.selected(torch.zeros(2, 1, 1, dtype=torch.long), 4)
    q, k = torch.zeros(2, 1, 0, 4), torch.zeros(2, 1, 8, 4)
    for at in (100, torch.tensor([100, 90])):
        assert rg.attention(q, k, k, listed, at=at).shape == (2, 1, 0, 4)


def test_a_chain_is_causal():
    chain = rg.tree(torch.arange(-1, 39))
    assert torch.equal(chain.allowed(40), rg.causal().allowed(40))


def test_trees_and_lists_may_differ_by_batch_row():
    parents = torch.stack([random_tree(20, 1), random_tree(20, 2)])
    assert torch.equal(rg.tree(parents).allowed(20)[:, 0], torch.stack(list(map(ancestors, parents))))
    indices = torch.tensor([[[0, -1], [1, 0]], [[1, -1], [-1, -1]]])
    table = rg.selected(indices, size=3).allowed(6)
    assert table.shape == (2, 1, 6, 6)
    assert torch.equal(table[0, 0], rg.selected(indices[0], size=3).allowed(6))
    assert torch.equal(table[1, 0], rg.selected(indices[1], size=3).allowed(6))
    by_head = rg.selected(indices[None], size=3).allowed(6)
    assert torch.equal(by_head[0], table[:, 0])


@pytest.mark.parametrize("m", [300, 512])
def test_blocks_are_classified_as_a_whole(m):
    parents = random_tree(m, 5, roots=0.004)
    indices = torch.randint(-1, -(-m // 128), (-(-m // 128), 2), generator=torch.Generator().manual_seed(1))
    half = rg.selected(indices.repeat(2, 1), size=64)
    for pattern in (rg.tree(parents), rg.selected(indices, size=128), rg.causal() & half):
        found = BlockGrid(torch.arange(m)[None], m).classify(pattern)
        table = torch.nn.functional.pad(pattern.allowed(m), (0, -m % 128, 0, -m % 128)).view(
            -(-m // 128), 128, -1, 128
        )
        assert bool((~found.all[0] | table.all(3).all(1)).all())  # never said of a block that is not
        assert bool((~found.none[0] | ~table.any(3).any(1)).all())
    assert classify(rg.tree(parents), *[_run(m)] * 2).all.sum() == 0


def _run(m):
    from regard.pattern import Run

    return Run(np.arange(0, m, 128), 1, np.full(-(-m // 128), 1))


def test_listed_blocks_are_what_is_attended_to():
    indices = torch.tensor([[0, -1, -1], [0, 1, -1], [2, 0, 2], [1, -1, 3]])
    pattern, table = rg.selected(indices, size=4), torch.zeros(14, 14, dtype=torch.bool)
    for i in range(14):
        for j in range(14):
            table[i, j] = j // 4 in indices[i // 4].tolist()
    assert torch.equal(pattern.allowed(14), table)
    assert pattern.count(14) == int(table.sum())
    assert torch.equal(pattern.allowed(5, 14, at=9), table[9:])
    assert torch.equal(pattern.row_mask(True)(0, torch.arange(14)[:, None], torch.arange(14)), table)


@pytest.mark.parametrize(("at", "last"), [(16, 18), ((2, 7), 16), (torch.tensor([3, 15]), 17)])
def test_queries_beyond_the_listed_blocks_are_refused(at, last):
    pattern, x = (
        rg.causal() & rg.selected(torch.tensor([[0], [1], [2], [3]]), size=4),
        torch.randn(2, 1, 3, 4),
    )
    text = f"selected(<4×1 indices>, size=4) up to query {last}: it lists 4 blocks of 4 queries, and 5 are needed"
    keys = torch.randn(2, 1, 16, 4)
    for call in (pattern.allowed, lambda *given: rg.attention(x, keys, keys, pattern, at=at)):
        with pytest.raises(ShapeError) as error:
            call(3, 16, at)
        assert str(error.value) == text


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference", "tiles"])
def test_data_changed_in_place_are_read_again(backend, inference):
    """A buffer that holds another tree, or other blocks, at each step; in inference mode changes are not counted."""
    with torch.inference_mode(inference):
        x = torch.randn(1, 2, 128, 8, generator=torch.Generator().manual_seed(0))
        chain, halves = torch.arange(128) - 1, torch.arange(128) - 1
        halves[64] = -1
        own, first = torch.arange(8)[:, None], torch.zeros(8, 1, dtype=torch.long)
        for word, old, new in (
            (rg.tree, chain, halves),
            (lambda indices: rg.selected(indices, 16), own, first),
        ):
            buffer = old.clone()
            pattern, expected = word(buffer), word(new)
            assert not torch.equal(pattern.allowed(128), expected.allowed(128))
            rg.attention(x, x, x, pattern, backend=backend)
            buffer.copy_(new)
            assert torch.equal(pattern.allowed(128), expected.allowed(128))
            assert pattern.count(128) == expected.count(128)
            found = rg.attention(x, x, x, pattern, backend=backend)
            assert_close(found, rg.attention(x, x, x, expected.allowed(128), backend="reference"))


def test_a_change_to_what_is_no_tree_or_list_is_named():
    parents, indices = torch.arange(6) - 1, torch.zeros(3, 1, dtype=torch.long)
    words = rg.tree(parents), rg.selected(indices, 2)
    parents[2], indices[1] = 5, -2
    for word, text in zip(words, ("tree: position 2 is a child of 5", "selected: there is no block -2")):
        with pytest.raises(ShapeError, match=text):
            word.allowed(6)


@pytest.mark.parametrize("listed", [(3, 0), (2, 3, 0), (2, 2, 3, 0), (3, 1), (2, 3, 1), (2, 2, 3, 1)])
def test_blocks_of_queries_may_list_nothing(listed):
    pattern = rg.selected(torch.full(listed, -1), size=2)
    tables = torch.zeros(listed[:-2]).numel()
    assert pattern.count(6) == 0 and not pattern.allowed(6).any() and not pattern.allows(1, 1)
    assert (~pattern).count(6) == (rg.window(2) | ~pattern).count(6) == 36 * tables
    if len(listed) < 4:
        mask = (rg.causal() & ~pattern).block_mask(6)
        b, i = torch.tensor(0), torch.arange(6)
        assert torch.equal(mask.mask_mod(b, b, i[:, None], i), i[:, None] >= i)


@pytest.mark.parametrize("heads", [None, 1])
def test_lists_of_each_batch_row_have_a_block_mask(heads):
    lists = torch.tensor([[[0], [2], [1]], [[-1], [0], [2]]])
    pattern = rg.selected(lists if heads is None else lists[:, None], size=128)
    mask = (pattern & rg.causal()).block_mask(3 * 128)
    expected = [[[1, 0, 0], [0, 0, 0], [0, 1, 0]], [[0, 0, 0], [1, 0, 0], [0, 0, 1]]]
    assert mask.to_dense()[:, 0].tolist() == expected
    b, i = torch.arange(2)[:, None, None], torch.arange(3 * 128)
    found = mask.mask_mod(b, torch.tensor(0), i[:, None], i)
    assert torch.equal(found, (pattern & rg.causal()).allowed(3 * 128)[:, 0])


def test_lists_of_each_head_have_no_common_block_mask():
    with pytest.raises(ShapeError) as error:
        rg.selected(torch.zeros(1, 2, 3, 1, dtype=torch.long), size=2).block_mask(6)
    assert str(error.value) == (
        "selected(<1×2×3×1 indices>, size=2) differs by head, which one mask for all heads cannot express"
    )


@pytest.mark.parametrize(
    "make",
    [lambda: rg.tree(random_tree(48, 3)), lambda: rg.selected(torch.tensor([[0, -1], [0, 1], [1, 2]]), 16)],
)
def test_they_run_with_causal_and_with_gradients(make):
    pattern = rg.causal() & make()
    random = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, 48, 8, generator=random, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    o = rg.attention(q, k, v, pattern)
    right = rg.attention(q, k, v, pattern.allowed(48), backend="reference")
    assert_close(o, right)
    found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (o, right))
    assert_close(found, wanted)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: rg.tree(torch.tensor([-1, 2, 1])),
            "tree: position 1 is a child of 2, which comes after it; each parent comes before its children, −1 is a "
            "root",
        ),
        (
            lambda: rg.tree(torch.tensor([-1, 0, 2])),
            "tree: position 2 is its own parent; each parent comes before its children, −1 is a root",
        ),
        (
            lambda: rg.tree(torch.tensor([-1, -2])),
            "tree: position 1 is a child of -2, and −1 is the only number for none; each parent comes before its "
            "children, −1 is a root",
        ),
        (
            lambda: rg.tree(torch.arange(-1, 3)).allowed(5),
            "tree(<4 parents>) over 5 keys: one parent per key is needed, (5,) or (b, 5)",
        ),
        (
            lambda: rg.tree(torch.tensor([-1.0, 0.0])),
            "tree: parents of torch.float32; whole numbers are needed, such as parents.long()",
        ),
        (
            lambda: rg.tree(torch.full((1, 2, 3), -1)),
            "tree: parents of shape (1, 2, 3); (m,) or (b, m) is needed",
        ),
        (
            lambda: rg.documents(torch.tensor(0)),
            "documents: ids of shape (); (m,) or (b, m) is needed",
        ),
        (
            lambda: rg.tree([-1, 0]),
            "tree: parents is of type list, not a tensor; use torch.as_tensor(parents)",
        ),
        (
            lambda: rg.selected(torch.tensor([[0.0]]), 2),
            "selected: indices of torch.float32; whole numbers are needed, such as indices.long()",
        ),
        (lambda: rg.selected(torch.tensor([[0, -3]]), 2), "selected: there is no block -3; −1 lists none"),
        (lambda: rg.selected(torch.tensor([[0]]), 0), "selected(size=0): a whole number >= 1 is needed"),
        (
            lambda: rg.selected(torch.tensor([[0], [7]]), 4).allowed(8),
            "selected(<2×1 indices>, size=4) over 8 keys: block 7 is listed, and there are 2 blocks of 4",
        ),
        (
            lambda: rg.selected(torch.tensor([0, 7]), 4),
            "selected: indices of shape (2,); (blocks, k), (b, blocks, k) or (b, h, blocks, k) is needed",
        ),
    ],
)
def test_what_is_no_tree_or_list_is_named(make, text, as_users_run_it):
    with pytest.raises(ShapeError) as refusal:
        make()
    assert str(refusal.value) == text


@pytest.fixture
def as_users_run_it():
    """The shape checker of the test run would speak before the message under test."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("seed", range(12))
def test_blocks_of_lists_are_classified_without_their_pairs(seed):
    """What is called empty or full is; for queries one after the other, all empty blocks are found."""
    random = np.random.default_rng(seed)
    m, size = int(random.choice([5, 128, 300, 513])), int(random.choice([1, 3, 64, 100, 128, 200]))
    blocks = -(-m // size)
    shape = ((blocks, 3), (2, blocks, 3), (2, 1, blocks, blocks))[seed % 3]
    word = rg.selected(torch.from_numpy(random.integers(-1, blocks, shape)), size)
    for start, step in ((0, 1), (-7, 1), (3, 2)):
        positions = torch.arange(start, m, step)[None]
        grid = BlockGrid(positions, m, step)
        found, right = grid.classify(word), grid.enumerate(word.allows)
        assert not (found.all & ~right.all).any() and not (found.none & ~right.none).any()
        if (start, step) == (0, 1):
            assert torch.equal(found.none, right.none)


@pytest.mark.parametrize(
    "word",
    [
        rg.documents(torch.zeros(1, 6, dtype=torch.long)),
        rg.tree(torch.arange(6)[None] - 1),
        rg.lengths(torch.tensor([4])),
        rg.selected(torch.zeros(1, 3, 1, dtype=torch.long), 2),
    ],
    ids=repr,
)
def test_one_row_of_data_is_for_all_batch_rows_of_a_mask(word):
    """A mask of FlexAttention asked for ids of batch row 2, where there is one for all."""
    i = torch.arange(6)
    found = word.block_mask(6).mask_mod(torch.tensor(2), torch.tensor(0), i[:, None], i)
    assert torch.equal(found.expand(6, 6), word.allowed(6).reshape(6, 6))


def test_numbers_that_cannot_be_read_are_refused_in_words():
    for word in (lambda x: rg.selected(x, 4), rg.tree):
        with pytest.raises(ShapeError, match="its numbers must be read, and a tensor on meta has none"):
            word(torch.zeros(3, 2, dtype=torch.long, device="meta"))


@pytest.mark.compiled
def test_blocks_that_a_compiled_router_chooses():
    """As in NSA and MoBA: the indices are computed in the graph, so nothing is known of them while it is traced."""

    def routed(q, k, v, size=4):
        blocks = (
            (q.unflatten(-2, (-1, size)).mean(-2) @ k.unflatten(-2, (-1, size)).mean(-2).mT).topk(2).indices
        )
        return rg.attention(q, k, v, rg.causal() & rg.selected(blocks, size))

    compiled = torch.compile(routed, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed, n in enumerate((32, 20)):
        numbers = torch.randn(4, 2, 3, n, 8, generator=torch.Generator().manual_seed(seed))
        *given, weight = (x.clone().requires_grad_() for x in numbers)
        right, ours = routed(*given), compiled(*given)
        assert_close(ours, right)
        assert_close(*(torch.autograd.grad((o * weight).sum(), given) for o in (ours, right)))


@pytest.mark.compiled
@pytest.mark.parametrize("block", [5, 6, -2])
def test_a_block_that_there_is_not_is_refused_when_a_compiled_graph_runs(block):
    def listed(q, indices):
        return rg.attention(q, q, q, rg.selected(indices, 4))

    indices = torch.tensor([[0, block]] * 5)
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.compile(listed, fullgraph=True, backend="aot_eager")(torch.randn(1, 1, 20, 4), indices)


@pytest.mark.compiled
def test_a_tree_that_a_compiled_function_declares():
    def packed(q, k, v, parents):
        return rg.attention(q, k, v, rg.tree(parents) & rg.window(9))

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    q, k, v = torch.randn(3, 2, 2, 30, 8, generator=torch.Generator().manual_seed(0)).unbind()
    for seed in range(2):  # the same graph
        parents = torch.stack([random_tree(30, seed), random_tree(30, seed + 2)])
        assert_close(compiled(q, k, v, parents), packed(q, k, v, parents))
    with pytest.raises(ShapeError, match="position 3 is its own parent"):
        compiled(q, k, v, torch.tensor([[-1, 0, 1, 3, *range(3, 29)]] * 2))
