"""A model that drafts, made of the model it drafts for: its first layers, with both ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vramjax.host_tier import Weights


class FirstLayers:
    """The first layers of a model, as a model of their own: nothing is copied, and its tokens are the same.

    What leaves a layer is what came in and something more, so that the head makes sense of it before the last layer
    too: often of the token that the whole model would choose.

    Example: `FirstLayers(weights, 6)` of a model of 30 layers has the layers 0 ... 5 of `weights`.
    """

    def __init__(self, weights: Weights, num_layers: int) -> None:
        """So many layers of `weights`, at least one and not more than it has."""
        assert 0 < num_layers <= weights.config.num_layers
        self.config = dataclasses.replace(weights.config, num_layers=num_layers)
        self.groups, self.layout = weights.groups, weights.layout
        self._weights = weights

    def load_layer(self, layer_idx: int) -> dict[str, np.ndarray]:
        return self._weights.load_layer(layer_idx)

    def read_layer_into(self, layer_idx: int, arrays: Mapping[str, np.ndarray], *, drop_pages: bool = False) -> None:
        self._weights.read_layer_into(layer_idx, arrays, drop_pages=drop_pages)

    def will_need_layer(self, layer_idx: int) -> None:
        self._weights.will_need_layer(layer_idx)

    def load_head(self) -> dict[str, np.ndarray]:
        return self._weights.load_head()

    def read_head_into(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._weights.read_head_into(arrays)
