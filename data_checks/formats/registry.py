"""Every format there is. A new one is written in a module of its own and named here."""

from __future__ import annotations

from data_checks.formats.base import Format
from data_checks.formats.choices import HELPSTEER2_PREFERENCE, HELPSTEER3, SAFE_RLHF, SHP, SUMMARIZE, WEBGPT
from data_checks.formats.llama_factory import LLAMA_FACTORY_ALPACA, LLAMA_FACTORY_SHAREGPT
from data_checks.formats.other_formats import OTHER_FORMATS
from data_checks.formats.pairs import PAIRS, ULTRAFEEDBACK_BINARIZED
from data_checks.formats.ranked import NECTAR, REWARDBENCH2
from data_checks.formats.transcripts import HH
from data_checks.formats.ultrafeedback import ULTRAFEEDBACK

PAIR_FORMATS: tuple[Format, ...] = (
    PAIRS,
    HH,
    ULTRAFEEDBACK,
    ULTRAFEEDBACK_BINARIZED,
    SUMMARIZE,
    WEBGPT,
    SHP,
    SAFE_RLHF,
    HELPSTEER2_PREFERENCE,
    HELPSTEER3,
    NECTAR,
    REWARDBENCH2,
    LLAMA_FACTORY_ALPACA,
    LLAMA_FACTORY_SHAREGPT,
)
FORMATS: dict[str, Format] = {known.name: known for known in (*PAIR_FORMATS, *OTHER_FORMATS)}
"""Name -> format, in the order of docs and messages. The config's lists of names are held to it by a test."""
