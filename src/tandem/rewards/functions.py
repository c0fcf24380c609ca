"""Rewards as pure functions of a completion and the right answer, between 0 and 1."""


def exact_match(completion: str, answer: str) -> float:
    """1 where the two are the same but for surrounding white space."""
    return float(completion.strip() == answer.strip())


def positional_match(completion: str, answer: str) -> float:
    """Share of positions where the two agree; the longer of the two counts, so that extra text costs."""
    longest = max(len(completion), len(answer))
    if longest == 0:
        return 1.0
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / longest
