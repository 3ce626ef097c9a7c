"""The one error of the example: something the user can put right, told in a line."""


class UserError(Exception):
    """What was expected, what came, and what to do next; `main` prints it and leaves with a non-zero status."""
