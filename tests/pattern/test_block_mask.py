"""`Pattern.block_mask` lists the blocks that PyTorch's create_block_mask lists, without an n × m table."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import regard as rg
from long_cases import in_long
from regard.pattern import BlockGrid, Related, Relation

TABLES = ("kv", "full_kv", "q", "full_q")


def random_word(rng: random.Random, n: int) -> rg.Pattern:
    far = rng.choice([3, 100, 128, 300, n])
    near_edges = [0, 1, 2, 126, 127, 128, 129, 255, 256, 257, rng.randint(0, far)]
    k = rng.choice([2, 5, 64, 127, 128, 129, 200, 500])
    return rng.choice(
        [
            rg.causal(),
            rg.full(),
            rg.window(rng.choice(near_edges), rng.choice(near_edges)),
            rg.every(k, rng.randrange(k)),
            rg.rows(k, rng.randrange(k)),
            rg.strided(k),
            rg.dilated(rng.randint(1, 9), rng.choice([1, 3, 64, 130])),
            rg.sinks(rng.choice(near_edges)),
            rg.prefix(rng.choice(near_edges)),
            rg.blocks(k),
            Related(Relation(near=-far, far=2 * far, divisor=k, query_below=n // 2, key_class=(3, 1))),
        ]
    )


def random_case(seed: int) -> tuple[rg.Pattern, int, int, int | None]:
    rng = random.Random(seed)
    n, m = rng.randint(1, 900), rng.randint(1, 900)
    if rng.random() < 0.4:
        m = n
    pattern = random_word(rng, n)
    for _ in range(rng.randint(0, 3)):
        other = random_word(rng, n)
        pattern = rng.choice([pattern & other, pattern | other, pattern - other, ~pattern])
    return pattern, n, m, None if n <= m and rng.random() < 0.7 else rng.randint(-200, 500)


def lists(mask: object, name: str, rows: int | None = None) -> list[list[int]]:
    """The blocks of each row, or of the first rows, sorted."""
    count, blocks = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
    assert count.dtype == blocks.dtype == torch.int32 and count.shape == blocks.shape[:3]
    return [sorted(row[:c].tolist()) for c, row in zip(count[0, 0, :rows].tolist(), blocks[0, 0])]


def assert_equal_to_pytorch(pattern: rg.Pattern, n: int, m: int, at: int | None) -> None:
    table = pattern.allowed(n, m, at)
    expected = create_block_mask(lambda b, h, i, j: table[i, j], 1, 1, n, m, device="cpu")
    mask = pattern.block_mask(n, m, at)
    for name in TABLES:
        assert lists(mask, name) == lists(expected, name), (pattern, n, m, at, name)
    assert mask.shape == expected.shape and mask.BLOCK_SIZE == expected.BLOCK_SIZE
    assert torch.equal(mask.to_dense(), expected.to_dense())
    rows, keys = torch.randint(n, (50,)), torch.randint(m, (50,))
    assert torch.equal(mask.mask_mod(0, 0, rows, keys), table[rows, keys])


EDGES = [  # one pair more or less in a corner of a block
    rg.window(3, 1), rg.window(127, 0), rg.window(129, 128), rg.causal() - rg.window(127), rg.sinks(128),
    rg.causal() - rg.window(126), rg.sinks(129), rg.prefix(127), rg.blocks(128), rg.blocks(200), rg.every(128, 127),
    rg.every(129, 128), rg.strided(255), rg.strided(256), rg.rows(129) & (rg.window(300) - rg.window(250)),
    ~rg.rows(1), rg.full(), rg.every(100) & rg.rows(150) & (rg.window(200) - rg.window(190)),
]  # fmt: skip


@pytest.mark.parametrize("pattern", EDGES, ids=repr)
def test_it_equals_create_block_mask_at_the_edges_of_blocks(pattern):
    for n, m, at in ((512, 512, None), (384, 600, 40), (300, 300, None)):
        assert_equal_to_pytorch(pattern, n, m, at)


def test_blocks_are_of_one_kind_only_if_they_hold_the_same_pairs():
    assert_equal_to_pytorch(rg.strided(363) & rg.rows(254, 40), 1282, 1282, None)


@pytest.mark.parametrize("part", [0, *in_long(1)])
def test_it_equals_create_block_mask(part):
    for seed in range(25 * part, 25 * part + 25):
        assert_equal_to_pytorch(*random_case(seed))


@pytest.mark.long
def test_it_equals_create_block_mask_on_2000_patterns():
    for seed in range(2000):
        assert_equal_to_pytorch(*random_case(seed))


LONG = [
    rg.causal(),
    rg.causal() & (rg.window(1024) | rg.sinks(16)),
    rg.causal() & rg.blocks(4096),
    *in_long(rg.causal() & rg.window(1024), rg.window(128) | rg.sinks(64)),
]


@pytest.mark.parametrize("pattern", LONG, ids=repr)
def test_a_million_positions_compute_few_pairs(pattern, monkeypatch):
    """A table has 10¹² pairs."""
    pairs = []
    allows = Relation.allows
    monkeypatch.setattr(Relation, "allows", lambda self, i, j: pairs.append(i.shape[0]) or allows(self, i, j))
    mask = pattern.block_mask(1_000_000)
    assert sum(pairs) < 200  # blocks, of each word
    rows = -(-1_000_000 // 128)
    for name in TABLES:
        assert getattr(mask, f"{name}_num_blocks").shape == (1, 1, rows)
        assert getattr(mask, f"{name}_indices").shape[:3] == (1, 1, rows)
    monkeypatch.undo()
    short = pattern.block_mask(128 * 64)  # the first rows do not depend on the length
    for name in ("kv", "full_kv"):
        assert lists(mask, name, 32) == lists(short, name, 32)


def test_a_long_list_is_a_view():
    mask = rg.causal().block_mask(7812 * 128)
    for table in (mask.full_kv_indices, mask.full_q_indices):
        assert table.shape == (1, 1, 7812, 7811) and table.untyped_storage().nbytes() < 1 << 20
    assert mask.full_kv_num_blocks[0, 0, -1] == 7811 and mask.kv_num_blocks[0, 0, -1] == 1
    assert mask.full_kv_indices[0, 0, -1, [0, 1, 7810]].tolist() == [0, 1, 7810]
    assert mask.full_q_num_blocks[0, 0, [0, 5]].tolist() == [7811, 7806]
    assert mask.full_q_indices[0, 0, 5, :2].tolist() == [6, 7]


def test_documents_skip_blocks_of_other_documents():
    ids = torch.arange(1024) // 256
    pattern = rg.documents(ids) & rg.causal()
    mask = pattern.block_mask(1024)
    assert mask.kv_num_blocks.tolist() == [[[1] * 8]] and mask.full_kv_num_blocks.tolist() == [[[0, 1] * 4]]
    assert torch.equal(
        mask.mask_mod(0, 0, torch.tensor([300, 300]), torch.tensor([255, 256])), torch.tensor([False, True])
    )


@pytest.mark.parametrize("seed", range(12))
def test_documents_skip_blocks_by_positions_within_each(seed):
    """No pair is lost or added; a block within one document is classified as if the document were alone."""
    rng = random.Random(seed)
    m, step = 1200, rng.choice([1, 1, 3])
    ids = torch.stack([(torch.rand(m) < rng.choice([0.002, 0.01, 0.1])).cumsum(0) for _ in range(2)])
    ids = ids[0] if rng.random() < 0.3 else ids % rng.choice([4, 10**6])  # documents in several places
    inner = rg.causal() & (random_word(rng, 400) | random_word(rng, 400) | rg.sinks(rng.randint(0, 200)))
    pattern, start = rg.documents(ids, inner), rng.choice([0, -70, 100])
    n = (m - 100) // step
    grid = BlockGrid((start + step * torch.arange(n))[None], m, step)
    mine, exact = grid.classify(pattern), grid.enumerate(pattern.allows)
    assert not (mine.none & ~exact.none).any() and not (mine.all & ~exact.all).any()
    mask = pattern.block_mask(n, m, (start, step))
    r, key = torch.randint(n, (500,)), torch.randint(m, (500,))
    for b in range(len(ids.view(-1, m))):
        table = pattern.allowed(n, m, (start, step)).reshape(-1, n, m)[b]
        assert torch.equal(mask.mask_mod(torch.tensor(b), 0, r, key), table[r, key])


def test_a_window_within_a_document_skips_blocks_of_the_same_document():
    ids = torch.arange(2048) // 1024
    mask = rg.documents(ids, rg.causal() & (rg.window(64) | rg.sinks(4))).block_mask(2048)
    needed = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert needed.tolist() == [[[1, 2, 3, 3, 3, 3, 3, 3] * 2]]


@pytest.mark.compiled  # FlexAttention traces its mask even where nothing is compiled
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_it():
    from torch.nn.attention.flex_attention import flex_attention

    pattern, n = rg.causal() & (rg.window(100) | rg.every(64)), 300
    q, k, v = torch.randn(3, 1, 2, n, 16, generator=torch.Generator().manual_seed(0)).unbind()
    o = flex_attention(q, k, v, block_mask=pattern.block_mask(n))
    assert torch.allclose(o, rg.attention(q, k, v, pattern), atol=1e-5)
