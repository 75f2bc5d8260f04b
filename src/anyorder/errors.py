"""The one exception that means: the input was wrong, and its sentence says what would be right."""


class InputError(ValueError):
    """Say in one sentence what was given and what is accepted; the command line prints it and exits with 2."""


def first_line(error: BaseException, most: int = 200) -> str:
    """Take what a library's error says in one line, its kind where it says nothing."""
    said = str(error).strip()
    return said.splitlines()[0][:most] if said else type(error).__name__
