"""Text, tokens and batches: what is read, what is refused, how little is padding."""

import gzip
import json
from itertools import chain

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import regard as rg
from regard.training.data import corpora, datasets, text, tokens
from regard.training.data.batches import Stream, by_tokens
from regard.training.data.datasets import ContinuousText
from regard.training.data.ragged import Ragged
from regard.training.data.rows import IGNORED, Labeled, Pairs, Windows
from regard.training.data.tokens import END, PAD, START, Tokens


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_pairs_are_read_plain_and_zipped(tmp_path, name):
    file = tmp_path / name
    raw = "one\tuno\r\ntwo ñ\tdos\n".encode()
    file.write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    assert text.pairs(file) == [("one", "uno"), ("two ñ", "dos")]


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path):
    """Editors on Windows write one."""
    file = tmp_path / "a.tsv"
    file.write_bytes(b"\xef\xbb\xbfone\tuno\r\n\xef\xbb\xbftwo\tdos\r\n")
    assert text.pairs(file) == [("one", "uno"), ("\ufefftwo", "dos")]
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"source": "one", "target": "uno"}\n')
    assert text.records(lines, "source", "target") == [("one", "uno")]


@pytest.mark.parametrize("name", ["A.JSONL", "A.JSONL.GZ"])
def test_the_format_follows_from_the_name_in_capitals_too(tmp_path, name):
    raw = b'{"source": "one", "target": "uno"}\n' * 2
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("GZ") else raw)
    assert datasets._pairs(tmp_path / name, "source", "target") == [("one", "uno")] * 2


def test_files_may_be_paths_and_sizes_are_whole_numbers(tmp_path):
    file = tmp_path / "a.tsv"
    assert datasets.SentencePairs(train=file, valid=file) == datasets.SentencePairs(
        train=str(file), valid=str(file)
    )
    assert datasets.ContinuousText(file=file).file == datasets.LabeledText(file).train == str(file)
    assert datasets.MaskedText(train=file).train == str(file)
    with pytest.raises(rg.SpecError, match=r"^vocab='300': a whole number is needed$"):
        datasets.SentencePairs(vocab="300")
    with pytest.raises(rg.SpecError, match=r"^no corpus 'de-en'; the corpora are en-es, shakespeare$"):
        datasets.SentencePairs("de-en").load(tmp_path)


def test_jsonl_lines_and_whole_texts_are_read(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good", "label": 1}\n{"label": 0, "text": "bad"}\n')
    assert text.records(file, "label", "text") == [("1", "good"), ("0", "bad")]
    plain = tmp_path / "a.txt"
    plain.write_text("one\ntwo\n")
    assert text.sentences(plain) == ["one", "two"] and text.content(plain) == "one\ntwo\n"


@example("a      b      ab", 3)
@given(st.text("ab .\n\t'0é\u0301", max_size=60), st.integers(1, 12))
def test_pieces_of_a_text_have_its_tokens(whole, size):
    known = tokens.bpe(["a   b    ab 'b  00 ..     b\n\n a \n  b é"] * 9, 290)
    parts = text.pieces(whole, size)
    assert "".join(parts) == whole and all(len(part) >= size for part in parts[:-1])
    assert [i for ids in known.encode(parts) for i in ids] == known.encode([whole])[0]


@pytest.mark.parametrize("characters, every", [(10**6, 1), (30, 10), (290, 1), (100, 3)])
def test_subwords_are_learned_from_pieces_all_over_a_long_text(characters, every):
    pieces = [f"{i:03}" for i in range(100)]
    assert datasets._sample(pieces, characters) == pieces[::every]


BROKEN = {
    "empty.tsv": (b"", "empty.tsv is empty"),
    "tab.tsv": (b"a\tb\nno tab\n", "tab.tsv, line 2: 0 tabs where one is needed, source<TAB>target"),
    "tabs.tsv": (b"a\tb\tc\n", "tabs.tsv, line 1: 2 tabs where one is needed, source<TAB>target"),
    "bytes.tsv": (
        b"a\tb\nc\t\xff\n",
        "bytes.tsv, line 2: byte 3 is not UTF-8 (invalid start byte); convert the file first",
    ),
    "cut.tsv.gz": (gzip.compress(b"a\tb\n" * 99)[:-9], "cut.tsv.gz is not a complete gzip file: "),
    "damaged.tsv.gz": (
        gzip.compress(b"")[:10] + b"\xff" * 30,
        "damaged.tsv.gz is not a complete gzip file: Error -3 while decompressing",
    ),
    "plain.tsv.gz": (b"a\tb\n", "plain.tsv.gz is not a complete gzip file: Not a gzipped file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    raw, message = BROKEN[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(rg.FormatError) as refused:
        text.pairs(name)
    assert str(refused.value).startswith(message)
    with pytest.raises(rg.FormatError, match=r"^there is no file absent.tsv$"):
        text.pairs("absent.tsv")


@pytest.mark.parametrize("part", ["train", "valid", "test"])
@pytest.mark.parametrize(
    ("name", "raw", "side"),
    [
        ("a.tsv", "one\tuno\n  \tdos\n", "source"),
        ("a.tsv", "one\tuno\ntwo\t\n", "target"),
        (
            "a.jsonl",
            '{"source": "one", "target": "uno"}\n{"source": "", "target": "dos"}\n',
            "source",
        ),
    ],
)
def test_a_pair_with_an_empty_side_is_named_by_file_and_line(tmp_path, monkeypatch, part, name, raw, side):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(raw)
    (tmp_path / "good.tsv").write_text("one\tuno\n" * 30)
    files = {"train": "good.tsv", "valid": "good.tsv"} | {part: name}
    with pytest.raises(rg.FormatError, match=f"^{name}, line 2: the {side} is empty; remove lines"):
        datasets.SentencePairs(**files, vocab=300).load(tmp_path)


def test_a_record_without_its_field_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"label": 1}\n')
    with pytest.raises(rg.FormatError, match=r"^a.jsonl, line 2: no field 'text'; needed: text$"):
        text.records("a.jsonl", "text")
    (tmp_path / "b.jsonl").write_text("[1]\n")
    with pytest.raises(rg.FormatError, match=r"^b.jsonl, line 1: not an object; needed: text$"):
        text.records("b.jsonl", "text")
    for value, words in (("null", "null"), ('["x"]', "a list"), ('{"a": 1}', "an object")):
        (tmp_path / "d.jsonl").write_text(f'{{"text": {value}}}\n')
        with pytest.raises(
            rg.FormatError, match=rf"^d.jsonl, line 1: the field 'text' is {words}, not a text$"
        ):
            text.records("d.jsonl", "text")
    (tmp_path / "c.jsonl").write_text("{x\n")
    with pytest.raises(rg.FormatError, match=r"^c.jsonl, line 1: not JSON: "):
        text.records("c.jsonl", "text")


def test_the_texts_that_come_along_are_whole_and_say_whose_they_are():
    folder = corpora.folder("en-es")
    assert [len(text.pairs(folder / f)) for f in ("valid.tsv", "test.tsv")] == [1015, 1956]
    assert sum(1 for _ in text.lines(folder / "train.tsv.gz")) == 138_208
    assert (
        "licence" in (folder / "README.md").read_text() and len((folder / "NOTICES.txt").read_text()) > 10_000
    )
    assert text.content(corpora.folder("shakespeare") / "tiny.txt.gz").startswith("First Citizen:")


SENTENCES = ["the cat sat on the mat", "el gato se sentó en la estera", "¿qué? <s> 中文", "a  b"]


def test_character_ids_are_those_of_the_tokenizer():
    tokenizer = tokens.characters(["abc ñ¿\n", "𝄞"])
    text = "cab ñ𝄞\n?<s>¿é"
    assert tokenizer.character_ids(text).tolist() == tokenizer.encode([text])[0]
    assert tokenizer.character_ids("").tolist() == []


def test_the_pairs_as_one_text_are_grouped_by_source():
    lines = ContinuousText("en-es").text().split("\n")[:-1]
    assert len(lines) == 138_208 and all(line.count("\t") == 1 for line in lines[:1000])
    verses = [i for i, line in enumerate(lines) if "Yahweh" in line]
    assert len(verses) > 1000 and verses[-1] - verses[0] < 27_617  # the Bible is one part


@pytest.fixture(scope="module", params=["bpe", "unigram", "characters"])
def made(request) -> Tokens:
    if request.param == "characters":
        return tokens.characters(SENTENCES)
    return getattr(tokens, request.param)(SENTENCES * 20, 320)


def test_a_single_text_is_not_encoded_letter_by_letter():
    with pytest.raises(rg.FormatError, match=r"^'the cat' is one text; put it into a list, \['the cat'\]$"):
        tokens.characters(["the cat"]).encode("the cat")


def test_what_is_encoded_comes_back(made):
    assert made.decode(made.encode(SENTENCES)) == SENTENCES
    again = Tokens.from_json(made.json())
    assert again.encode(SENTENCES) == made.encode(SENTENCES) and len(again) == len(made)


def test_text_never_holds_a_special_token(made):
    said = made.encode(["</s> <s> <pad>"])[0]
    assert not {PAD, START, END} & set(said)


def test_special_tokens_are_named_and_left_out_of_texts(made):
    ids = [START, *made.encode(["the mat"])[0], END, PAD]
    assert made.words(ids)[0] == "<s>" and made.words(ids)[-2:] == ["</s>", "<pad>"]
    assert made.decode([ids]) == ["the mat"]


def test_any_byte_can_be_written():
    made = tokens.bpe(["abc"] * 9, 300)
    assert made.decode(made.encode(["žluťoučký 🐎\n"])) == ["žluťoučký 🐎\n"]


def test_foreign_tokenizers_and_small_vocabularies_are_refused():
    with pytest.raises(rg.FormatError, match=r"^not a tokenizer: "):
        Tokens.from_json("{}")
    other = json.loads(tokens.characters(["ab"]).json())
    other["model"]["vocab"]["<pad>"], other["model"]["vocab"]["a"] = 4, 0
    other["added_tokens"] = []
    with pytest.raises(
        rg.FormatError,
        match="the first ids of this tokenizer are not <pad>, <s>, </s>, <unk>; it was not made by",
    ):
        Tokens.from_json(json.dumps(other))
    with pytest.raises(
        rg.FormatError, match=r"^a vocabulary of 99 cannot hold 4 special tokens and 256 bytes; use 260"
    ):
        tokens.bpe(["a"], 99)


lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=60)


@given(lengths, st.integers(18, 60), st.integers(0, 3))
def test_an_epoch_has_every_row_once_within_the_budget(rows, most, epoch):
    sizes = torch.tensor(rows)
    plan = by_tokens(sizes, most, epoch=epoch)
    assert sorted(torch.cat([plan[i] for i in range(len(plan))]).tolist()) == list(range(len(rows)))
    padded = [len(plan[i]) * int(sizes[plan[i]].amax(0).sum()) for i in range(len(plan))]
    assert max(padded) <= most and sum(padded) == plan.padded >= plan.real == int(sizes.sum())


def test_little_of_the_corpus_is_padding_and_two_epochs_differ():
    noise = torch.Generator().manual_seed(0)
    source = torch.randint(1, 60, (20_000,), generator=noise)
    sizes = torch.stack([source, (source + torch.randint(-5, 9, (20_000,), generator=noise)).clamp(min=1)], 1)
    one, again, other = (by_tokens(sizes, 4096, epoch=e) for e in (0, 0, 1))
    assert 0 < one.padding_share < 0.06
    assert torch.equal(one.rows, again.rows) and one.cuts == again.cuts
    assert not torch.equal(one.rows, other.rows)
    in_order = -(-len(sizes) // 64)  # random batches of 64 rows, for comparison
    random = sum(64 * int(sizes[64 * i : 64 * i + 64].amax(0).sum()) for i in range(in_order))
    assert plan_waste(sizes, random) > 5 * one.padding_share


def plan_waste(sizes, padded):
    return 1 - int(sizes.sum()) / padded


def test_a_stream_goes_on_from_two_numbers():
    sizes = torch.tensor([[n] for n in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)])
    stream = Stream(sizes, 9, seed=4)
    seen = [stream.next().tolist() for _ in range(30)]
    later = Stream(sizes, 9, seed=4)
    for done in range(30):  # the ends of epochs too
        resumed = Stream(sizes, 9, seed=4, epoch=later.epoch, index=later.index)
        assert [resumed.next().tolist() for _ in range(30 - done)] == seen[done:]
        later.next()


@given(lengths, st.integers(1, 5), st.integers(1, 7))
def test_ranks_share_an_update_whole_whatever_their_number(rows, world, batches):
    sizes = torch.tensor(rows)
    alone = Stream(sizes, 18)
    ranks = [Stream(sizes, 18, rank=r, world=world) for r in range(world)]
    for _ in range(3):
        wanted = sorted(chain(*(alone.next().tolist() for _ in range(batches))))
        parts = [s.share(batches) for s in ranks]
        assert sorted(r for rank in parts for part in rank for r in part.tolist()) == wanted
        assert {len(rank) for rank in parts} == {batches // world + batches % world}
    assert all((s.epoch, s.index) == (alone.epoch, alone.index) for s in ranks)


def test_rows_that_cannot_be_batched_are_refused():
    with pytest.raises(
        rg.SpecError, match=r"^a row of 9 tokens does not fit into a batch of 8; raise tokens, or drop"
    ):
        by_tokens(torch.tensor([[4, 5]]), 8)
    with pytest.raises(rg.SpecError, match=r"^there are no rows to make batches of$"):
        by_tokens(torch.zeros(0, 1, dtype=torch.long), 8)


def test_a_batch_of_pairs_is_shifted_by_one_and_ignores_padding():
    data = Pairs(Ragged.of([[5, 6, 7], [8]]), Ragged.of([[9], [10, 11]]))
    assert data.sizes.tolist() == [[3, 2], [1, 3]]
    batch = data.batch(torch.tensor([1, 0]))
    assert batch.predicted == 5
    assert {k: v.tolist() for k, v in batch.inputs.items()} == {
        "source": [[8, PAD, PAD], [5, 6, 7]],
        "source_lengths": [1, 3],
        "target": [[START, 10, 11], [START, 9, PAD]],
        "targets": [[10, 11, END], [9, END, IGNORED]],
    }


def test_batches_of_stretches_and_labels():
    text_ids = Windows(torch.arange(10, dtype=torch.int32), context=3, step=2)
    assert len(text_ids) == 4
    batch = text_ids.batch(torch.tensor([0, 3]))
    assert batch.inputs["tokens"].tolist() == [[0, 1, 2], [6, 7, 8]]
    assert batch.inputs["targets"].tolist() == [[1, 2, 3], [7, 8, 9]] and batch.predicted == 6
    inputs = Labeled(Ragged.of([[5], [6, 7]]), torch.tensor([1, 0])).batch(torch.tensor([1, 0])).inputs
    assert (inputs["tokens"].tolist(), inputs["labels"].tolist()) == ([[6, 7], [5, PAD]], [0, 1])


@given(st.integers(9, 80), st.integers(1, 7), st.integers(1, 9), st.integers(0, 9))
def test_a_loose_window_begins_within_its_step_and_ends_within_the_text(total, context, step, seed):
    torch.manual_seed(seed)
    windows = Windows(torch.arange(total, dtype=torch.int32), context, step, random_offset=True)
    rows = torch.arange(len(windows))
    batch = windows.batch(rows).inputs
    drawn = batch["tokens"][:, 0] - rows * step
    assert int(drawn.min()) >= 0 and int(drawn.max()) < step
    assert torch.equal(batch["targets"], batch["tokens"] + 1) and int(batch["targets"].max()) < total


def test_two_epochs_of_loose_windows_differ():
    torch.manual_seed(0)
    windows = Windows(torch.arange(999, dtype=torch.int32), 10, 10, random_offset=True)
    one, two = (windows.batch(torch.arange(len(windows))).inputs["tokens"] for _ in range(2))
    assert not torch.equal(one, two)
