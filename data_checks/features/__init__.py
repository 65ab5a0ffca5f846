"""What can be seen in each text by itself: flags, counts of layout, lengths."""

from data_checks.features.flags import PATTERNS, Flag, Pattern, describe
from data_checks.features.text import text_features

__all__ = ["PATTERNS", "Flag", "Pattern", "describe", "text_features"]
