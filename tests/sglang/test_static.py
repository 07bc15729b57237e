"""Claims of static.py, with the real ledger and a device whose free bytes fall as weights load."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvcached_core.ledger import Ledger
from kvcached_sglang.static import StaticLease, checkpoint_bytes

GIB = 1 << 30
TOTAL = 24 * GIB


def test_an_engine_alone_on_its_card_loads_more_than_half_of_it(runtime_dir: Path) -> None:
    loaded = [0]
    free = lambda: TOTAL - loaded[0]  # noqa: E731
    with closing(Ledger.open("GPU-1", TOTAL, runtime_dir=runtime_dir, headroom_bytes=GIB, driver_free=free)) as ledger:
        account = ledger.join("m", engine="sglang")
        member: Any = SimpleNamespace(
            account=account,
            limits=SimpleNamespace(total_bytes=TOTAL),
            backend=SimpleNamespace(device_id="GPU-1"),
        )
        static = StaticLease(member, lambda: loaded[0], 0.9)
        for weights in (0, 16 * GIB):  # not on this machine before it loads; or known
            loaded[0] = 0
            account.static_used(0)
            static.take(weights)
            loaded[0] = 17 * GIB
            static.take()
            [seen] = ledger.snapshot().members
            assert seen.static_used_bytes == 17 * GIB
            assert seen.static_lease_bytes == 17 * GIB + int(TOTAL * (1 - 0.9))


def arguments(path: Path | str, **changed: Any) -> Any:
    plain = {"load_format": "auto", "tp_size": 1, "revision": None, "download_dir": None}
    return SimpleNamespace(model_path=str(path), **(plain | changed))


def weights(folder: Path, **sizes: int) -> Path:
    """A folder with files of so many bytes; ``__`` is a dot."""
    folder.mkdir(parents=True)
    for name, size in sizes.items():
        (folder / name.replace("__", ".")).write_bytes(bytes(size))
    return folder


def test_the_weights_of_a_folder_by_the_rank(tmp_path: Path) -> None:
    folder = weights(tmp_path / "model", a__safetensors=300, b__safetensors=100, config__json=7)
    assert checkpoint_bytes(arguments(folder)) == 400
    assert checkpoint_bytes(arguments(folder, tp_size=2)) == 200
    assert checkpoint_bytes(arguments(folder, load_format="dummy")) == 0


def test_of_weights_in_several_formats_one_counts(tmp_path: Path) -> None:
    folder = weights(tmp_path / "model", a__safetensors=300, pytorch_model__bin=310, a__pt=320)
    assert checkpoint_bytes(arguments(folder)) == 300


def test_a_single_file(tmp_path: Path) -> None:
    folder = weights(tmp_path / "model", a__gguf=50, b__gguf=60)
    assert checkpoint_bytes(arguments(folder / "a.gguf")) == 50


def test_the_weights_of_a_repository_that_has_been_downloaded(tmp_path: Path) -> None:
    cached = tmp_path / "models--someone--model"
    weights(cached / "snapshots/0123", a__safetensors=300)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0123")
    assert checkpoint_bytes(arguments("someone/model", download_dir=str(tmp_path))) == 300
    assert checkpoint_bytes(arguments("someone/other", download_dir=str(tmp_path))) == 0
    assert checkpoint_bytes(arguments("s3://bucket/some/model", download_dir=str(tmp_path))) == 0


def test_the_lease_that_is_held_is_known(runtime_dir: Path) -> None:
    ledger = Ledger.open("GPU-1", TOTAL, runtime_dir=runtime_dir, headroom_bytes=GIB, driver_free=lambda: TOTAL)
    with closing(ledger):
        member: Any = SimpleNamespace(
            account=ledger.join("m", engine="sglang"),
            limits=SimpleNamespace(total_bytes=TOTAL),
            backend=SimpleNamespace(device_id="GPU-1"),
            static_bytes=0,
        )
        StaticLease(member, lambda: 3 * GIB, 0.75).take(2 * GIB)
        assert member.static_bytes == 3 * GIB + 2 * GIB + TOTAL // 4
