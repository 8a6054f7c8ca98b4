"""How the documentation is rendered: equations become MathML, pictures become part of the page. Nothing is fetched by a browser.

MkDocs calls these functions (``hooks`` in mkdocs.yml). A fence named ``math`` holds LaTeX, which code forges show as well. Drawings
of ``scripts/pictures`` have the text colour of the page only where they are part of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert


def equation(source: str, language: str, css_class: str, options: Any, md: Any, **others: Any) -> str:
    """A fence of LaTeX as MathML."""
    found = convert(source.strip(), display="block")
    found = found.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')  # a norm's bars have the height of a letter
    return f'<div class="equation">{found}</div>'


def on_config(config: Any) -> Any:
    """Let fences named ``math`` be equations."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "math", "format": equation})
    return config


def on_page_content(html: str, page: Any, **others: Any) -> str:
    """Put the drawings in place of the images that name them, and bars for escaped bars in tables."""
    folder = Path(page.file.abs_src_path).parent

    def drawing(found: re.Match[str]) -> str:
        text = re.sub(r"<style>.*?</style>\n?", "", (folder / found[1]).read_text())
        return f'<span class="drawing">{text}</span>'

    html = re.sub(r"<td.*?</td>", lambda cell: cell[0].replace(r"\|", "|"), html, flags=re.S)  # escaped for code forges
    return re.sub(r'<img [^>]*src="([^"]*pictures/[\w-]+\.svg)"[^>]*>', drawing, html)
