"""The README as package indexes show it, where links to files of the repository lead nowhere.

With a `Repository` among the URLs of `pyproject.toml` such a link becomes one to the file there, at the tag of the
version. Without one it becomes its words with the path of the file, which is among the packed sources, too.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link or a picture whose target has no scheme and is no heading of the page itself.
_RELATIVE = re.compile(r"(!?)\[([^\]]+)\]\((?!#|[a-z]+:)([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Makes the field `readme`, which `pyproject.toml` declares dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository", "")
        readme = readme_of_index(text, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def readme_of_index(text: str, repository: str, tag: str) -> str:
    """A Markdown text without relative links: they lead to files of a repository at a tag or, where it is empty, are
    words."""

    def replaced(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        if repository:
            return f"{mark}[{words}]({repository.rstrip('/')}/{'raw' if mark else 'blob'}/{tag}/{target})"
        path = target.partition("#")[0]
        return words if words == path else f"{words}: `{path}`"

    return _RELATIVE.sub(replaced, text)
