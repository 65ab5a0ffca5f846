"""The formats that hold no pairs."""

from __future__ import annotations

from data_checks.formats.base import Format
from data_checks.formats.other_feedback import FEEDBACK, HELPSTEER2
from data_checks.formats.other_llama_factory import LLAMA_FACTORY_ALPACA_KTO, LLAMA_FACTORY_KTO
from data_checks.formats.other_prompts import OPENRLHF_PROMPTS, PROMPTS, VERL
from data_checks.formats.other_stepwise import STEPWISE

OTHER_FORMATS: tuple[Format, ...] = (
    *(FEEDBACK, HELPSTEER2, LLAMA_FACTORY_KTO, LLAMA_FACTORY_ALPACA_KTO),
    *(PROMPTS, VERL, OPENRLHF_PROMPTS),
    STEPWISE,
)
