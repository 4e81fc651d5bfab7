"""The pages of the documentation's site that are made while it is built: the command line, and the changelog."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def command_line() -> str:
    """Return the help of every command as one page."""
    command = [sys.executable, "-m", "typer", "autotune.cli.main", "utils", "docs", "--name", "autotune"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    # Examples are lines of their own, which Markdown would join.
    found = re.sub(
        r"^Examples:\n((?:  .*\n)+)", lambda match: f"```console\n{match[1]}```\n", found, flags=re.MULTILINE
    )
    return found.replace("# `autotune`", "# Command line", 1)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    files.append(File.generated(config, "command-line.md", content=command_line()))
    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    return files
