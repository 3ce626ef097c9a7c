"""The one error of the example: something the user can put right, told in a line."""


class UserError(Exception):
    """What was expected, what came, and what to do next; `main` prints it and leaves with a non-zero status."""


def one_line(error: Exception) -> str:
    """An error's message; of one that came out of a process that loads images, what that process said."""
    text = str(error).strip()
    last = text.splitlines()[-1] if text else type(error).__name__
    return last.partition("UserError: ")[2] if "UserError: " in last else " ".join(text.split())
