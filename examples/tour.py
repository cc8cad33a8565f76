"""A short tour on the CPU: a pattern, the Transformer of the paper, its cost, laws and heads, a toy translator."""

from pathlib import Path

import torch

import regard as rg
from regard.cli.models import included_translator, own_output


def patterns() -> None:
    p = rg.causal() & (rg.window(2) | rg.every(4))
    n = 16
    print(f"A pattern is a set of pairs (query, key): {p}\n")
    print(p.draw(n))
    saved, million = 1 - p.count(n) / n**2, 1_000_000
    print(f"\n{p.count(n)} of {n**2} pairs, {saved:.1%} saved; {p.count(million):,} at n = {million:,}\n")
    print(rg.explain(p, n=16384), "\n")

    q, k, v = torch.randn(3, 1, 8, n, 64).unbind()
    o = rg.attention(q, k, v, p)
    print(f"rg.attention(q, k, v, p): q, k, v of {tuple(q.shape)} → {tuple(o.shape)}\n")


def hello_world() -> None:
    words = ["<start>", "<end>", "Hello", "world", "Hola", "mundo"]
    declared = rg.preset("transformer-base")
    model = declared.build().eval()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"The Transformer of the paper, {parameters:,} parameters:\n")
    for name, part in (
        ("embedding", model.encoder.embedding),
        ("encoder block", model.encoder.blocks[0]),
        ("decoder block", model.decoder.blocks[0]),
    ):
        print(f"  {name}")
        for parameter, tensor in part.named_parameters():
            print(f"    {parameter:32} {' × '.join(map(str, tensor.shape))}")

    source = torch.tensor([[words.index("Hello"), words.index("world")]])
    target = torch.tensor([[words.index(w) for w in ("<start>", "Hola", "mundo")]])
    with torch.no_grad():
        logits, maps = model(source, target, return_weights=True)
    print('\n"Hello world" → "Hola mundo", untrained:')
    for name, weights in (
        ("encoder self-attention", maps["encoder"][0]["self"]),
        ("decoder self-attention", maps["decoder"][0]["self"]),
        ("decoder cross-attention", maps["decoder"][0]["cross"]),
    ):
        print(f"  {name:24} {tuple(weights.shape[1:])} (heads, queries, keys)")
    print(f"  logits                   {tuple(logits.shape[1:])} (positions, vocabulary)")
    rows, columns = ["<start>", "Hola", "mundo"], ["Hello", "world"]
    print("\n  cross-attention of the first head:   " + "  ".join(f"{c:>5}" for c in columns))
    for word, row in zip(rows, maps["decoder"][0]["cross"][0, 0].tolist()):
        print(f"    {word:>36} " + "  ".join(f"{w:.3f}" for w in row))


def price() -> None:
    print("\nThe cost of one of its encoder layers at 1,000 tokens, before anything runs:\n")
    print(rg.preset("transformer-base").encoder.block.cost(n=1000))


def prove() -> None:
    print("\nThree laws, tested on PyTorch's own attention:\n")
    function = torch.nn.functional.scaled_dot_product_attention
    print(rg.check(function, laws=["L01", "L20", "L29"], budget=20))


def learn(folder: Path) -> None:
    print("\nA toy translator, trained in seconds:\n")
    result = rg.train("T3", out=folder / "T3")
    print(f"{result}\nIts page, with the attention maps: {result.report}")


def see(folder: Path) -> None:
    translator = included_translator()
    source = torch.tensor([translator.tokenizer.encode(["You do not have permission to open this file."])[0]])
    target = own_output(translator, source)  # what the model itself generates
    view = rg.look(translator.model, (source, target), translator.tokenizer.words)
    print(
        f"\nThe heads of the translator of regard: {view}\nAll heads in one page: {view.save(folder / 'heads.html')}"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    patterns()
    hello_world()
    price()
    prove()
    folder = Path("runs")
    folder.mkdir(exist_ok=True)
    learn(folder)
    see(folder)
