"""Layouts: how a cache's elements lie in memory, as data."""

from hawk.layouts.compiled import CacheShape, CompiledLayout
from hawk.layouts.layout import Layout
from hawk.layouts.library import load, names

__all__ = ["CacheShape", "CompiledLayout", "Layout", "load", "names"]
