"""Every error a user can meet, by the part of the work it stops.

All derive from :class:`D3Error`, so that one `except D3Error` at the door of a command can print
the message without a traceback. A message says where, what was got, what is expected, what to do.
"""


class D3Error(Exception):
    """Base of all errors raised on purpose by Megatron-D3."""


class ConfigError(D3Error):
    """A configuration file, override or flag that cannot be used as it stands."""


class CorpusError(D3Error):
    """A `.bin`/`.idx` pair, tokenizer or score file that is missing, broken or does not fit."""


class PlanError(D3Error):
    """The plan cannot be written, or a position was read that is not decided."""


class ResumeError(PlanError):
    """A plan on disk does not belong to the run that wants to continue it."""


class ProbeError(D3Error):
    """A probe of the model cannot be taken as asked."""
