"""What these tests would notice: an engine whose memory is not there where it should be does not go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engine import KIB, Engine, EngineDied, prompts
from tests.sglang.pair import settings

SKIPPING = """
from kvcached_core.backends.base import hookimpl
from kvcached_core.backends.host import HostBackend

class Skipping(HostBackend):
    '''Forgets one page that is mapped.'''
    pages = 0
    forgotten = None

    def map(self, address, size_bytes, page_bytes):
        before, self.pages = self.pages, self.pages + size_bytes // page_bytes
        if before < 3 * 8 <= self.pages:  # past the pinned extent, in the first that is grown into
            self.forgotten = address
            address, size_bytes = address + page_bytes, size_bytes - page_bytes
        if size_bytes:
            super().map(address, size_bytes, page_bytes)

    def zero(self, spans):
        for start, size in spans:
            cut = [(start, size)]
            if self.forgotten is not None and start <= self.forgotten < start + size:
                cut = [(start, self.forgotten - start), (self.forgotten + PAGE, start + size - self.forgotten - PAGE)]
            super().zero([(a, n) for a, n in cut if n > 0])

@hookimpl(tryfirst=True)
def kvcached_make_backend(kind, budget_bytes):
    return Skipping(budget_bytes) if kind == "host" else None
"""


def test_a_skipped_map_kills_the_process(gqa_model: Path, tmp_path: Path, runtime_dir: Path):
    (tmp_path / "skipping.py").write_text(f"PAGE = {32 * KIB}\n{SKIPPING}")
    metadata = tmp_path / "skipping-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: skipping\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[kvcached.backends]\nskipping = skipping\n")
    engine = Engine(gqa_model, tmp_path / "log", settings(runtime_dir), python_path=[tmp_path])
    try:
        engine.wait_ready()
        with pytest.raises(EngineDied):
            engine.generate(prompts(4, 400, seed=1), 8)
        assert "crashed with exit code -11" in engine.log_text()
    finally:
        engine.kill()
