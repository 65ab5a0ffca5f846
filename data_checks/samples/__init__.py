"""Checks that cost too much for every row, over a sample of at most `sample_rows` examples."""

from data_checks.samples.analysis import SampleAnalysis, analyse
from data_checks.samples.numbers import NUMBERS, Number
from data_checks.samples.statistics import position_p_value

__all__ = ["NUMBERS", "Number", "SampleAnalysis", "analyse", "position_p_value"]
