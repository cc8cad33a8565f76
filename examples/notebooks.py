"""Creates the three notebooks of this folder from their scripts and runs them: `python examples/notebooks.py`.

A script is divided into cells by `# %%` and, for text, `# %% [markdown]`, as editors display them.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("attention_by_hand", "a_sparse_llama", "inside_a_translator")


def cells(name: str) -> list[tuple[str, str]]:
    """("markdown" or "code", text) of each cell of a script."""
    parts = []
    for part in (HERE / f"{name}.py").read_text("utf-8").split("# %%")[1:]:
        first, _, body = part.partition("\n")
        is_text = "[markdown]" in first
        lines = [line.removeprefix("#").removeprefix(" ") if is_text else line for line in body.splitlines()]
        parts.append(("markdown" if is_text else "code", "\n".join(lines).strip()))
    return parts


def main() -> None:
    import nbformat
    from nbclient import NotebookClient

    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    for name in NAMES:
        book = nbformat.v4.new_notebook()
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        book.cells = [make[kind](text, id=f"cell-{i}") for i, (kind, text) in enumerate(cells(name))]
        NotebookClient(book, timeout=600, resources={"metadata": {"path": str(HERE)}}).execute()
        for cell in book.cells:
            cell.metadata.pop("execution", None)  # times of this machine
            if "outputs" in cell:  # warnings name paths of this machine
                cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        nbformat.write(book, HERE / f"{name}.ipynb")
        print(HERE / f"{name}.ipynb")
    (HERE / "heads.html").unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
