"""torchrun, but that its exit code tells whether another start would help: torch's own is 1 however a rank failed.

python -m tandem.trainer.parallel.torchrun --standalone --nproc-per-node=2 -m MODULE …
"""

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from tandem.utils.log import say
from tandem.utils.processes import REFUSED, UNUSABLE


def exit_code(failed: ChildFailedError) -> int:
    codes = {failure.exitcode for failure in failed.failures.values()}
    return next((code for code in (REFUSED, UNUSABLE) if code in codes), 1)


if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as error:
        say(str(error), error=True)
        raise SystemExit(exit_code(error)) from None
