"""docs/metrics.md, read as a table: which metrics it names, and which of a run it does not."""

import json
import re
from pathlib import Path

from tandem.utils.imports import is_import_path
from tandem.utils.metrics import LINE_KEYS, read_metrics
from tandem.utils.run_dir import RunDir

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
PROCESSES = ("orchestrator", "trainer", "sft", "align")
NAME = re.compile(r"`([^`]+)`")


def documented(page: str = PAGE.read_text()) -> list[str]:
    """The names in the first column of all tables, those of Prometheus included."""
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in NAME.findall(row)]


def pattern_of(name: str) -> re.Pattern[str]:
    """A name of the page, in which <…> stands for any."""
    return re.compile("".join(".+" if part.startswith("<") else re.escape(part) for part in re.split("(<.*?>)", name)))


def undocumented(run_dir: RunDir) -> set[str]:
    """Metrics that a run has written and the page does not name. Those of users' own losses are theirs."""
    configs = {path.stem: json.loads(path.read_text()) for path in run_dir.config.glob("*.json")}
    environments = [env["name"] for env in configs.get("orchestrator", {}).get("envs", [])]
    known = [pattern_of(name) for name in documented() if name != "eval/<metric>"]
    found: set[str] = set()
    for line in read_metrics(run_dir):
        if is_import_path(configs.get(line["process"], {}).get("loss", {}).get("type", "")):
            continue
        for name in line.keys() - LINE_KEYS:
            plain = name
            for environment in environments:
                plain = plain.removeprefix(f"{environment}/").replace(f"eval/{environment}/", "eval/")
            if line["process"] in ("sft", "align"):
                plain = plain.removeprefix("eval/")
            if not any(pattern.fullmatch(plain) for pattern in known) and plain != "groups":
                found.add(f"{line['process']}: {name}")
    return found
