"""SGLang imports here once, with its warnings let be: everything else in these tests turns warnings into errors."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"
sys.path.append(str(STUBS))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.managers.scheduler  # noqa: F401
