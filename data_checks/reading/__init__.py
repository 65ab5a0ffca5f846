"""Files to rows, in bounded memory. No row is dropped: what cannot be read becomes a row with a finding.

`blocks` cuts a file into pieces that can be sent to worker processes; `read_block` turns one into rows.
"""

from data_checks.reading.block import MAX_ROW_BYTES, Block
from data_checks.reading.files import blocks, iter_rows, read_block
from data_checks.reading.hub import is_hub_id
from data_checks.reading.records import parse_line

__all__ = ["MAX_ROW_BYTES", "Block", "blocks", "is_hub_id", "iter_rows", "parse_line", "read_block"]
