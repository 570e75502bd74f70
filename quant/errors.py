"""The root of every error that Halfbyte raises on purpose.

A caller who catches HalfbyteError catches every refusal of bad input; anything else that escapes is a defect.
The text of an error is one line that says what was wrong, where, and what to do about it.
"""


class HalfbyteError(Exception):
    """Base of all named errors. `str(error)` is one line fit for a terminal."""


class FormatError(HalfbyteError):
    """A block format is unknown, or an array does not suit it."""


class NonFiniteError(HalfbyteError):
    """A tensor holds NaN or infinity where only finite numbers can be quantized."""
