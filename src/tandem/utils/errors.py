"""The one exception for mistakes a user can mend. Entrypoints print it and leave with exit code 2."""


class UserError(ValueError):
    """Says what is wrong, the value that is wrong, and what would be right."""
