"""What the site has beside the pages of docs: the README is its home, and the pages beside it come
along. A folder in the menu stands for all its pages.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
_OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
_LINK = re.compile(r"\]\((?!https?:|#)(?P<target>[^)#]+)")


def on_config(config: Any) -> Any:
    """List the pages of each folder that the menu names."""
    docs = Path(config["docs_dir"])
    for section in config["nav"]:
        for title, folder in section.items():
            if isinstance(folder, str) and (docs / folder).is_dir():
                section[title] = sorted(
                    f"{folder}/{page.name}" for page in (docs / folder).glob("*.md")
                )
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add them, with links that fit their places there; `config` is MkDocs's own."""
    for name, page in _OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        up = "../" * page.count("/")
        moved = _LINK.sub(lambda link, up=up: f"]({_target(link['target'], up)}", text)
        files.append(File.generated(config, page, content=moved))
    return files


def _target(target: str, up: str) -> str:
    if target in _OUTSIDE:
        return up + _OUTSIDE[target]
    if target == "LICENSE":
        return "https://www.apache.org/licenses/LICENSE-2.0"
    if target == "docs/reference":
        target += "/command-line.md"
    return up + target.removeprefix("docs/")
