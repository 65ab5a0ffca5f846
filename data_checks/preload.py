"""What worker processes need, imported once in the process that they are forked from."""

import data_checks.check
import data_checks.examine
import data_checks.reading
import data_checks.whole.contamination
import data_checks.whole.sketches
import data_checks.workers  # noqa: F401
