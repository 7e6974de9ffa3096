"""How a user's mistake is reported: option, value, reason and remedy, one to a line."""

from __future__ import annotations

from collections.abc import Sequence


class UsageError(ValueError):
    """A wrong option or argument.

    Args:
        option: the flag or parameter, as the user writes it.
        value: what was given.
        reason: why that cannot work.
        remedy: what does work.
    """

    def __init__(self, *, option: str, value: object, reason: str, remedy: str) -> None:
        self.option, self.value, self.reason, self.remedy = option, value, reason, remedy
        super().__init__(
            f"\n  option: {option}\n  value:  {value}\n  reason: {reason}\n  remedy: {remedy}"
        )


class UsageErrors(UsageError):
    """Several mistakes found in one pass, reported together."""

    def __init__(self, errors: Sequence[UsageError]) -> None:
        self.errors = tuple(errors)
        ValueError.__init__(
            self,
            f"{len(self.errors)} unsupported option(s):" + "\n".join(str(e) for e in self.errors),
        )


def flatten(error: UsageError) -> list[UsageError]:
    """The single mistakes inside `error`."""
    return list(error.errors) if isinstance(error, UsageErrors) else [error]


def raise_all(errors: Sequence[UsageError]) -> None:
    """Raise all mistakes as one error; do nothing when there are none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise UsageErrors(errors)
