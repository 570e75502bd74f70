"""Halfbyte: a quantized LLM engine in Python and Numba.

    from halfbyte import Engine

Public names are imported when first used, so that `import halfbyte` costs nothing.
"""

__version__ = "0.1.0"
__all__ = ["Engine", "HalfbyteError", "__version__"]

TYPE_CHECKING = False  # type checkers go by the name; importing typing would take 9 ms
if TYPE_CHECKING:
    from .engine.engine import Engine
    from .quant.errors import HalfbyteError


def __getattr__(name: str) -> object:
    if name == "Engine":
        from .engine.engine import Engine

        return Engine
    if name == "HalfbyteError":
        from .quant.errors import HalfbyteError

        return HalfbyteError
    raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
