"""The pages that answer the documents: complete, in their order, and executed (test_docs.py runs them whole)."""

import re
from pathlib import Path

import pytest

from doc_pages import blocks, run_page
from ledger_rows import rows
from regard.laws import LAWS

DOCS = Path(__file__).parents[2] / "docs"
ANSWERS, ERRATA = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("answers", "errata"))


def sections(text: str, heading: str) -> dict[str, str]:
    """The text below each heading of this level."""
    parts = re.split(rf"^{heading} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


@pytest.mark.ledger("S2.0.1")
def test_the_walkthrough_goes_from_mechanics_to_the_sharp_limit_and_its_numbers_hold():
    text = ANSWERS[: ANSWERS.index("## Question 1")]
    steps = [name.split(".")[1].split(":")[0].strip() for name in sections(text, "###")]
    assert steps == [
        "The mechanics",
        "The parameters of a multi-head layer",
        "The cost",
        "Attention as a convolution",
        "The sharp limit that makes it exact",
    ]
    assert all(blocks(body) for body in sections(text, "###").values())
    run_page(text, "answers.md")  # each block compares the product with its number
    with pytest.raises(AssertionError, match="2072576000"):  # and fails where they differ
        run_page(text.replace("projected=2072576000", "projected=2072576001"), "answers.md")


@pytest.mark.ledger("S1.I.4")
def test_each_of_the_seven_questions_is_answered_by_a_block_that_runs():
    asked = {name: body for name, body in sections(ANSWERS, "##").items() if name.startswith("Question")}
    numbers = [re.match(r"Question (\d) \((\d+) marks\)", name).groups() for name in asked]
    assert [int(n) for n, _ in numbers] == [1, 2, 3, 4, 5, 6, 7]
    assert [int(marks) for _, marks in numbers] == [20, 18, 25, 22, 28, 20, 17] and sum(
        int(marks) for _, marks in numbers
    ) == 150
    for name, body in asked.items():
        source = "".join(text for _, text in blocks(body))
        lines = [line for line in source.splitlines() if line.startswith((">>>", "..."))]
        assert 2 <= len(lines) <= 10, name  # at least one call and its result, by hand or by calculator


def test_the_errata_list_every_wrong_and_every_imprecise_statement_once():
    listed = re.findall(
        r"^\| (S\d\.[\w.]+): .* \| (\*\*wrong\*\*|imprecise) \| .+ \| (.+) \|$", ERRATA, re.MULTILINE
    )
    ids = [id for id, _, _ in listed]
    verdicts = [verdict for _, verdict, _ in listed]
    assert len(ids) == len(set(ids)) == 75 and set(ids) <= {r.id for r in rows()}
    assert verdicts.count("**wrong**") == 19 and verdicts.count("imprecise") == 56
    code = "".join(source for _, source in blocks(ERRATA))
    laws = {law.number for law in LAWS}
    for id, _, shown in listed:
        assert set(re.findall(r"L\d\d", shown)) <= laws
        assert "below" in shown or "L" in shown or "regard train" in shown
        assert ("below" in shown) == bool(re.search(rf"# .*{re.escape(id)}\b", code)), id
