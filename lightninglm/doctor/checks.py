"""One line of a report: what was looked at, how it is, and what to do about it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Check:
    """
    Attributes:
        name: what was looked at.
        state: "problem" when a run will fail or lose something, "warning" when it may.
        found: how it is.
        advice: what to do; empty when nothing is to be done.
    """

    name: str
    state: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""


def print_checks(title: str, checks: Iterable[Check], console: Console) -> None:
    """Prints a table of checks, what to do below what was found."""
    table = Table("", "", "", title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for check in checks:
        advice = f"\n[italic]{_plain(check.advice)}[/italic]" if check.advice else ""
        state = f"[{STYLES[check.state]}]{check.state}[/{STYLES[check.state]}]"
        table.add_row(state, _plain(check.name), _plain(check.found) + advice)
    console.print(table)


def as_json(checks: Iterable[Check]) -> list[dict[str, str]]:
    """Checks as plain data."""
    return [asdict(check) for check in checks]


def exit_code(checks: Iterable[Check]) -> int:
    """1 when there is a problem."""
    return int(any(check.state == "problem" for check in checks))


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
