"""Links between the two sites of the documentation, which `make docs` builds into one folder.

A page names a page of the other site by its file, as it is in the repository; the site gets the
address at which the other site has it. Both sites' mkdocs.yml name this hook.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_SITES = {"docs": "", "neuroncore/docs": "neuroncore/"}
"""Where each folder of pages is built, below site/."""
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[\w/-]*docs/[\w/-]+)\.md(#[\w-]+)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write each link to a page of the other site as HTML, which mkdocs leaves as it is.

    Raises ValueError where there is no such page.
    """
    source = Path(page.file.abs_src_path)
    here = _address(source)

    def link(found: re.Match[str]) -> str:
        text, path, anchor = found.groups("")
        target = Path(os.path.normpath(source.parent / f"{path}.md"))
        if not target.is_file():
            raise ValueError(f"{source.relative_to(_ROOT)} links to {path}.md, which is not there")
        address = posixpath.relpath(_address(target) or ".", here or ".")
        return f'<a href="{address}/{anchor}">{text}</a>'

    return _LINK.sub(link, markdown)


def _address(page: Path) -> str:
    """Where a page is built, relative to site/."""
    for folder in sorted(_SITES, key=len, reverse=True):
        if page.is_relative_to(_ROOT / folder):
            parts = page.relative_to(_ROOT / folder).with_suffix("").parts
            return _SITES[folder] + "/".join(parts[:-1] if parts[-1] == "index" else parts)
    raise ValueError(f"{page} is a page of no site")
