"""The one exception that means: the input was wrong, and this sentence says what would be right."""


class InputError(ValueError):
    """Say in one sentence what was given and what is accepted; the command line prints it and exits with 2."""
