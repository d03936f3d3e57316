"""Decode language models that do not fit in GPU memory."""

from vramjax._version import __version__

__all__ = ["__version__"]
