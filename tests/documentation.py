"""The commands that README and docs show, as people would copy them."""

import re
import shlex
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
OWN = (
    "rl",
    "sft",
    "align",
    "sweep",
    "trainer",
    "orchestrator",
    "inference",
    "reward-server",
    "evaluate",
    "export-model",
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
MENTIONED = re.compile(r"`((?:benchmarks|docs|examples|scripts|src|tests)/[\w./-]+)`")
ASSIGNMENT = re.compile(r"[A-Z_]+=")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """`environment`: what is set for this command alone, as in `NAME=value rl …`."""

    page: str
    words: tuple[str, ...]
    environment: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def arguments(self) -> list[str]:
        return list(self.words[1:])

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def commands_of(page: Path) -> list[Command]:
    """In the order of the page, from its bash blocks; lines that are continued are one command."""
    found = []
    for language, block in FENCE.findall(page.read_text()):
        if language != "bash":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                settings = tuple(takewhile(ASSIGNMENT.match, words))
                words = tuple(words[len(settings) :])
                found += [Command(str(page.relative_to(ROOT)), words, settings)] if words else []
    return found


def all_commands() -> list[Command]:
    return [command for page in PAGES for command in commands_of(page)]


def stray_commands(page: Path) -> list[str]:
    """Lines that look like commands of ours outside of a bash block: nobody would check them."""
    text = FENCE.sub(lambda block: "" if block[1] in ("bash", "toml", "python") else block[2], page.read_text())
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line.startswith(tuple(f"{name} {sign}" for name in OWN for sign in ("@", "--")))]


def dead_links(page: Path) -> list[str]:
    """Links to files that do not exist, or to headings that a page does not have, and other paths that do not exist."""
    dead = [path for path in MENTIONED.findall(page.read_text()) if not (ROOT / path).exists()]
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        path = page.parent / target if target else page
        if "://" not in target and not (path.exists() and (not anchor or anchor in anchors_of(path))):
            dead.append(f"{target}#{anchor}")
    return dead


def anchors_of(page: Path) -> list[str]:
    """As GitHub makes them of headings."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
