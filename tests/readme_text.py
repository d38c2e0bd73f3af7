"""What README.md promises, taken from it: the set-up commands and the example. Standard library only.

`python tests/readme_text.py commands` prints the commands, one a line, for scripts that run them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def section(title: str) -> str:
    """The text under `## title`, up to the next heading of that level."""
    parts = re.split(r"^## (.+)$", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


def blocks(text: str, language: str) -> list[str]:
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The set-up commands."""
    return [block.strip() for block in blocks(section("Set-up"), "bash")]


def example() -> str:
    """The program of the serving step."""
    (program,) = blocks(section("A serving step"), "python")
    return program


if __name__ == "__main__":
    if sys.argv[1:] != ["commands"]:
        sys.exit("usage: readme_text.py commands")
    print("\n".join(commands()))
