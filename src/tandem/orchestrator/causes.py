"""Why the loop has ended, where several of its tasks have failed at once."""

from collections.abc import Iterator

from tandem.orchestrator.client import ServerLost
from tandem.orchestrator.failures import TooManyFailures
from tandem.utils.errors import UserError, is_unwritable


def cause_of(errors: BaseExceptionGroup) -> BaseException:
    """The reason for the end, without the wrapping of those tasks that ended with it."""
    met = list(leaves_of(errors))
    told = list(filter(is_unwritable, met))
    for kind in (ServerLost, TooManyFailures):
        told += [error for error in met if isinstance(error, kind)]
    if len(met) == 1 or all(isinstance(error, OSError | UserError) for error in met):  # the first is told in one line
        told += met
    return told[0] if told else errors


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves_of(each)
    else:
        yield error
