"""Write docs/tutorial.ipynb, the tutorial as a notebook, from docs/tutorial.md.

Run from the repository: python examples/tutorial
"""

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def notebook_of(text: str) -> NotebookNode:
    """Return the page as a notebook: Python blocks are code, what lies between them text."""
    parts = PYTHON_BLOCK.split(text)  # text, code, text, code, ..., text
    cells: list[NotebookNode] = []
    for index, part in enumerate(parts):
        if part.strip():
            new_cell = new_code_cell if index % 2 else new_markdown_cell
            cells.append(new_cell(part.strip(), id=f"cell-{index}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def main() -> None:
    """Write the notebook, without outputs."""
    nbformat.write(notebook_of(PAGE.read_text(encoding="utf-8")), NOTEBOOK)
    print(f"wrote {NOTEBOOK}")


if __name__ == "__main__":
    main()
