"""How results are shown: a table (rich where installed, else plain), progress lines, a plot. No measuring."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text_columns: int = 1,
    notes: Sequence[str] = (),
) -> None:
    """Prints a table to standard output; the first `text_columns` are text, the others numbers."""
    if importlib.util.find_spec("rich") is not None:
        _print_rich(title, columns, rows, text_columns)
    else:
        print(plain_table(title, columns, rows, text_columns))
    for note in notes:
        print(note)


def plain_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1
) -> str:
    """The table as text."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([title, line(columns), "  ".join("-" * w for w in widths), *map(line, rows)])


def _print_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text_columns else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # In a file or a pipe rich would assume 80 columns and fold the table.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(table)


class Progress:
    """One line on standard error that says what is being measured; rewritten in place on a terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._tty = sys.stderr.isatty()

    def start(self, what: str) -> None:
        """Announces the next of `total` cases."""
        self._done += 1
        text = f"[{self._done}/{self._total}] {what}"
        print(
            f"\r\x1b[K{text}" if self._tty else text,
            end="" if self._tty else "\n",
            file=sys.stderr,
            flush=True,
        )

    def finish(self) -> None:
        """Clears the line."""
        if self._tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def check_plot(output: str) -> None:
    """Fails before anything is measured if the plot could not be written afterwards.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
      ValueError: not a .png path in an existing folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    path = Path(output)
    if path.suffix.lower() != ".png":
        raise ValueError(f"--output: got {output!r}, expected a path that ends in .png")
    check_folder("--output", path)


def check_folder(option: str, path: str | Path) -> None:
    """Fails before anything is measured if the file could not be written afterwards, for want of a folder."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{option}: the folder {folder} does not exist")


def plot_bars(
    output: str, title: str, y_label: str, cases: Sequence[str], series: Mapping[str, Sequence[float]]
) -> None:
    """Writes grouped bars: one group per case, one colour per series."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0, 1.2 * len(cases) + 1.5), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        positions = [at - 0.4 + (index + 0.5) * width for at in range(len(cases))]
        axes.bar(positions, values, width, label=name)
    axes.set_xticks(range(len(cases)), cases, rotation=30 if len(cases) > 5 else 0)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
    figure.savefig(output, dpi=150)
