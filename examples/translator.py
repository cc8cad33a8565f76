"""The translator that is included in regard: translations, its cross-attention, and a translator of your own.

    python examples/translator.py [MINUTES]      # trains for this many minutes, 2 by default

First the model that is installed with regard; then the recipe `translate`, trained here, on the same sentences and
test rows.
"""

import sys
import time
from pathlib import Path

import torch

import regard as rg
from regard.training.data import corpora, text
from regard.training.data.tokens import END, START
from regard.training.models import card, folder
from regard.training.recipes.translation import scores
from regard.training.translator import open_translator

SENTENCES = [
    "Hello world",
    "Where is the library?",
    "My sister lives in Madrid.",
    "The file could not be opened.",
    "There are 42 devices in the room.",
]
EVERY = 20  # of the test rows, so that the comparison takes seconds


def translations(title: str, model: Path | None) -> None:
    began = time.perf_counter()
    found = rg.translate(SENTENCES, model=model)
    print(f"\n{title}, {time.perf_counter() - began:.1f} s:\n")
    for source, target in zip(SENTENCES, found, strict=True):
        print(f"  {source:36} {target}")


def bleu(model: Path | None) -> float:
    pairs = text.pairs(corpora.folder("en-es") / "test.tsv")[::EVERY]
    outputs = rg.translate([source for source, _ in pairs], model=model, strategy=rg.greedy())
    return scores(outputs, [reference for _, reference in pairs]).bleu


def show_cross_attention(out: Path) -> None:
    """The page shows every head; this table shows the most confident head of the last layer."""
    net, tokens, _ = open_translator()
    source = tokens.encode([SENTENCES[1]])[0]
    target = [START, *tokens.encode([rg.translate(SENTENCES[1])])[0]]
    view = rg.look(net, (torch.tensor([source]), torch.tensor([target])), tokens.words)
    with torch.no_grad():
        _, weights = net(torch.tensor([source]), torch.tensor([target]), return_weights=True)
    cross = weights["decoder"][-1]["cross"][0]
    head = int(cross.amax(-1).mean(-1).argmax())
    print(f"\nCross-attention while it writes “{rg.translate(SENTENCES[1])}”, last layer, head {head}:\n")
    words, written = tokens.words(source), tokens.words([*target[1:], END])
    print(" " * 12 + "".join(f"{word.strip():>9}" for word in words))
    for word, row in zip(written, cross[head].tolist(), strict=True):
        print(f"  {word.strip():10}" + "".join(f"{w:9.2f}" for w in row))
    print(
        f"\n  page     {view.save(out / 'translator.html')}\n  picture  {view.save(out / 'translator.png')}"
    )


def main() -> None:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    out = Path("runs")
    out.mkdir(exist_ok=True)
    translations("The translator that is included in regard (English to Spanish)", None)
    stated = card(folder()).scores["test, beam 4"]
    print(
        f"\n  BLEU {stated['BLEU']}, chrF {stated['chrF']} on {stated['rows']:,} test rows; its card: {folder()}"
    )
    show_cross_attention(out)
    print(f"\nNow a smaller one, trained here for {minutes:g} minutes:\n", flush=True)
    result = rg.train("translate", out=out / "translate", minutes=minutes, device="cpu")
    translations("The model that was just trained", result.folder)
    print(f"\n  BLEU on every {EVERY}th test row, greedy: {bleu(result.folder):.1f} trained here, ", end="")
    print(f"{bleu(None):.1f} the one of regard (six minutes on an NVIDIA H200)\n\n  report  {result.report}")


if __name__ == "__main__":
    main()
