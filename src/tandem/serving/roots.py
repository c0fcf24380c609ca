"""Which directories weights and adapters may be loaded from. A path in a request is not to be trusted: without
roots it would be a way to ask about any file the server can read. Standard library only: vLLM's server uses it too."""

import logging
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)
OUTPUTS = Path("outputs")  # where runs lie unless told otherwise, below the directory a server is started in


def weight_roots(model_dir: Path, added: Iterable[Path]) -> list[Path]:
    """The model and its neighbours, by its own name and by what a link stands for; outputs/; what was added."""
    real = model_dir.resolve()
    parents = [folder for folder in (model_dir.absolute().parent.resolve(), real.parent) if folder.parent != folder]
    return list(dict.fromkeys([real, *parents, OUTPUTS.resolve(), *(path.resolve() for path in added)]))


class WeightRoots:
    def __init__(self, roots: Iterable[Path]) -> None:
        self.roots = list(roots)
        logger.info("weights and adapters may come from below %s", ", ".join(str(root) for root in self.roots))

    def resolve(self, given: str, refused: type[ValueError]) -> Path:
        """The directory behind a path, links followed. Raises `refused` unless it lies below a root, whether there
        is something or not."""
        try:
            path = Path(given).resolve()
        except (OSError, ValueError, RuntimeError):  # a name too long, a NUL in it, links in a circle
            path = None
        if path is None or not any(path.is_relative_to(root) for root in self.roots):
            raise refused(
                f"{given!r} is not below a directory that weights may be loaded from; start the server with "
                "--server.weight-roots DIR to add one"
            )
        return path
