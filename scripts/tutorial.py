"""Runs docs/guide/tutorial.ipynb, and writes what its cells show into it and into docs/guide/tutorial.md with its pictures.

python scripts/tutorial.py            runs all cells, then writes notebook, page and pictures
python scripts/tutorial.py --run      runs all cells, and writes nothing
python scripts/tutorial.py --page     writes the page and the pictures from what the notebook has

Cells run in order in one process, in a folder of their own. Of a notebook's magic there is ``%%writefile NAME`` alone.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "guide" / "tutorial.ipynb"
WRITES = "%%writefile "
Output = dict[str, Any]


def run(notebook: dict[str, Any]) -> None:
    """Run all code cells, and put what they show into them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            cell["execution_count"] = number
            cell["outputs"] = outputs_of("".join(cell["source"]), names, number)


def outputs_of(source: str, names: dict[str, Any], number: int) -> list[Output]:
    """What one cell prints, and what its last expression shows."""
    if source.startswith(WRITES):
        name, _, content = source.removeprefix(WRITES).partition("\n")
        Path(name).write_text(content + "\n")
        return [stream(f"Writing {name}\n")]
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    found = [stream(printed.getvalue())] if printed.getvalue() else []
    return found if value is None else [*found, shown(value, number)]


def stream(text: str) -> Output:
    return {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}


def shown(value: Any, number: int) -> Output:
    """A value as notebooks show it: by its own HTML or picture, else as text."""
    data: dict[str, Any] = {"text/plain": [repr(value)]}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = [value._repr_html_()]
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    return {"output_type": "execute_result", "execution_count": number, "data": data, "metadata": {}}


def page(notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its pictures by their names."""
    parts, pictures = list[str](), dict[str, bytes]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text'])}```")
            elif "image/png" in output["data"]:
                name = f"tutorial-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![What the cell above shows]({name})")
            elif "text/html" in output["data"]:
                parts.append("".join(output["data"]["text/html"]))
            else:
                parts.append(f"```text\n{''.join(output['data']['text/plain'])}\n```")
    return "\n\n".join(parts) + "\n", pictures


def write_page(notebook: dict[str, Any], folder: Path = NOTEBOOK.parent) -> None:
    text, pictures = page(notebook)
    (folder / "tutorial.md").write_text(text)
    for path in folder.glob("tutorial-*.png"):
        path.unlink()
    for name, content in pictures.items():
        (folder / name).write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    notebook = json.loads(NOTEBOOK.read_text())
    if not given.page:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.path.insert(0, folder)
            before = os.getcwd()
            os.chdir(folder)
            try:
                run(notebook)
            finally:
                os.chdir(before)
        if given.run:
            print(page(notebook)[0])
            return
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    write_page(notebook)
    print(f"{NOTEBOOK} and its page are written.")


if __name__ == "__main__":
    main()
