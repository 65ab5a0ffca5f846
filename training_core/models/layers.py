"""Which kinds of layers a decoder has, as far as a cache of keys and values must know."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin


def has_only_full_attention(model: PreTrainedModel) -> bool:
    """Return whether every layer attends to all earlier tokens and keeps nothing but their keys and values.

    Only then may padding lie between cached tokens and new ones: a sliding window counts it as distance, and a
    recurrent state takes it in like any token.
    """
    return not has_recurrent_layers(model) and all(type(layer) is DynamicLayer for layer in _cache_layers(model))


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    """Return whether a layer carries a state from token to token (convolution, linear attention, state space)."""
    # Some models keep such a state outside the cache; transformers marks their class.
    is_stateful = bool(getattr(type(model), "_is_stateful", False))
    return is_stateful or any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in _cache_layers(model))


def _cache_layers(model: PreTrainedModel) -> list[object]:
    return list(DynamicCache(config=model.config).layers)
