"""The errors that a user can cause.

Each message is one sentence: the thing, what came, what was expected, what to do.
"""


class VramjaxError(Exception):
    """Base of every error that input, files or the machine can cause; anything else is a bug of vramjax."""


class CheckpointError(VramjaxError):
    """A checkpoint or a packed directory is incomplete, damaged, or of a kind that is not supported."""


class ConfigError(VramjaxError):
    """A model configuration, a flag or an argument has a value that cannot be used."""


class BudgetError(VramjaxError):
    """What was asked for does not fit in the memory that there is."""


class TextError(VramjaxError):
    """A tokenizer, a chat template or a prompt cannot be used."""


def raise_if_interrupt(error: BaseException) -> None:
    """Raises KeyboardInterrupt for what JAX makes of one that comes as it compares the keys of a cache: a ValueError
    whose message has the traceback."""
    if isinstance(error, ValueError) and "KeyboardInterrupt" in str(error):
        raise KeyboardInterrupt from error
