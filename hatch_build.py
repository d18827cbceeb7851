"""Hook for building the package: prints one line if the pages of `tapfm view` are not built, and so not included.

pip hides the output of a successful build: `pip install -v .` shows the line. Without the pages everything else works.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_INDEX_PAGE = Path("src") / "tapfm" / "viewer" / "static" / "index.html"


class ViewerPagesHook(BuildHookInterface[Any]):
    """Prints a line if the pages are missing; found and called by hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Check the pages before a wheel is built; hatchling calls this method."""
        # an editable installation reads the pages from the checkout, where they can still be built
        if version != "editable" and not (Path(self.root) / _INDEX_PAGE).is_file():
            self.app.display_warning(
                "The pages of tapfm view are not built, so this package does not contain them. To get them: install "
                "Node.js 18 or newer, run make setup, and install again; or install a release wheel."
            )
