"""What a person is told when something they gave cannot work."""


class UserError(Exception):
    """A mistake in the input: printed as one line on stderr, exit status 2."""

    shared = False  # with all other processes of the run
    told = False  # by another process, so that this one is silent


class RunError(Exception):
    """A run that cannot go on: printed as one line on stderr, exit status 1."""

    shared = False
    told = False
