"""Mathematical answers, compared as expressions by math-verify: 1/2 is 0.5 and \\frac{1}{2}."""

import logging

from tandem.rewards.functions import NoAnswer


def math(completion: str, answer: str) -> float:
    """1 where the last expression of the completion, in \\boxed{} first, equals the answer."""
    from math_verify import parse, verify

    # Without time limits of its own, which are signals: who calls it has one, and says so no less clearly.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    right = parse(answer, parsing_timeout=0) or parse(f"${answer}$", parsing_timeout=0)
    if not right:
        raise NoAnswer(f"the answer of the task, {answer[:80]!r}, is no expression that math-verify reads")
    return float(verify(right, parse(completion, parsing_timeout=0), timeout_seconds=0))
