"""Decode language models that do not fit in GPU memory.

    with vramjax.load("demo", keep=4) as model:
        for token in model.generate("Why is the sky blue?"):
            print(token.text, end="", flush=True)

`stream` brings any stack of layers, of any model, through a budget of device memory; `vramjax.residency` has its parts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vramjax._version import __version__

if TYPE_CHECKING:
    from vramjax.decode.sampler import Sampling
    from vramjax.generation import Token
    from vramjax.language_model import LanguageModel
    from vramjax.loading import load
    from vramjax.residency.streaming import stream

# Imported when first used, so that parts which need no JAX (policies, configs) do not import it.
_MODULE_OF = {
    "LanguageModel": "vramjax.language_model",
    "Sampling": "vramjax.decode.sampler",
    "Token": "vramjax.generation",
    "load": "vramjax.loading",
    "stream": "vramjax.residency.streaming",
}

__all__ = ["LanguageModel", "Sampling", "Token", "__version__", "load", "stream"]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
