"""How keys and values lie in pages of the KV cache, one file a layout. Constants need no numba; writers and readers import it."""

from __future__ import annotations

from ....quant.errors import HalfbyteError
from .floats import FloatLayout
from .layout import CacheLayout
from .q8 import Q8Layout

LAYOUTS: dict[str, CacheLayout] = {layout.name: layout for layout in (FloatLayout("f16", 2), FloatLayout("f32", 4), Q8Layout())}


class CacheLayoutError(HalfbyteError):
    """A layout of the KV cache that does not exist."""


def get_layout(name: str) -> CacheLayout:
    """The layout of that name. Raises CacheLayoutError for one that does not exist."""
    if name not in LAYOUTS:
        raise CacheLayoutError(f"the KV cache is kept as one of {', '.join(LAYOUTS)}, not {name!r:.60}")
    return LAYOUTS[name]
