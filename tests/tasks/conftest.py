"""The fixtures of tests/scripted."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripted"))

from scripted_stages.workspace import scripted, workspace

__all__ = ["scripted", "workspace"]
