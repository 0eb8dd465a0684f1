"""Errors of a pipeline, one class for each exit code of Chevron."""


class Error(RuntimeError):
    """A failure of a pipeline. Where a stage, the loss or the optimizer raised, its exception is `__cause__`, with its traceback."""

    code = 1  # Chevron's exit code: docs/reference/errors.md

    def __init__(self, message: str, rank: int = -1, peer: int = -1, step: int = -1, action: str = "") -> None:
        super().__init__(message)
        self.rank = rank      # the rank that reports the error; -1: none
        self.peer = peer      # the rank at fault, or at the other end of a message; -1: none
        self.step = step      # from 0; -1: outside of a step
        self.action = action  # of the rank: `1B3`, `RECV_F`, …


class StageError(Error):
    """A stage, the loss or the optimizer raised on this rank."""


class UsageError(Error, ValueError):
    """An argument, a module or a schedule cannot be used as given. Nothing was changed."""

    code = 2


class PeerLostError(Error):
    """Another rank ended or failed."""

    code = 3


class DeadlineError(Error):
    """Another rank runs, and did not answer within the deadline."""

    code = 4


class PreflightError(Error):
    """Ranks were given different schedules, options or data."""

    code = 5


class NumericalError(Error):
    """A loss, a gradient or a parameter is infinite or not a number."""

    code = 6


def make(code, message, rank, peer, step, action, cause):
    """The exception of a Chevron error; called by the binding. `cause` is the exception of Python code, or None."""
    if cause is not None:
        kind = StageError
    else:
        kind = {2: UsageError, 3: PeerLostError, 4: DeadlineError, 5: PreflightError, 6: NumericalError}.get(code, Error)
        # A rank that learns of another rank's failure is given that rank's code.
        if peer not in (-1, rank):
            kind = PeerLostError if code not in (4, 5, 6) else kind
    error = kind(message, rank, peer, step, action)
    error.code = code
    error.__cause__ = cause
    return error
