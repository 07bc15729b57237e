"""The ledger's figures as Prometheus metrics, on the engine's own ``/metrics``.

The numbers are those of `LedgerStatistics`, the same as ``kvcached status`` prints. One server exports its own members
only; those of one name on one device (ranks) are added up.

Where it works, by how an engine makes its ``/metrics`` (read in vLLM 0.30 to 0.34, SGLang 0.5.20 to 0.5.23):

- vLLM, one API server: the endpoint shows prometheus_client's default registry, in the API server's process
  (``vllm/v1/metrics/prometheus.py``). A collector there reads the ledger at each scrape.
- vLLM, several API servers (``--api-server-count``, data parallel), and SGLang always (``--enable-metrics``;
  ``sglang/srt/utils/common.py``, ``add_prometheus_middleware``): Prometheus multiprocess mode. The endpoint adds up
  files of a directory and shows no collector of any registry. A thread writes the figures into such a file once a
  second, the official way for gauges there (mode ``mostrecent``: of equal series the last written counts, so several
  processes may write the same). They are up to a second old, and counters have the type gauge, since a counter cannot
  be set and several writers' would be added up; ``rate()`` works on them all the same.
- Not at all: vLLM's Rust front end, its offline ``LLM`` class and Ray Serve, which don't show prometheus_client's
  metrics, and SGLang without ``--enable-metrics``. ``kvcached status --json`` has the same numbers.

prometheus_client is imported when `register` runs and not before: it decides at its import whether a process is in
multiprocess mode, and SGLang sets that mode after it has loaded the plugins.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcached_core.config import Settings
from kvcached_core.errors import LedgerError
from kvcached_core.ledger import Ledger
from kvcached_core.ledger_statistics import LedgerStatistics, MemberStatistics

if TYPE_CHECKING:
    from prometheus_client import Gauge
    from prometheus_client.core import Metric

MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
PUBLISH_SECONDS = 1.0

DEVICE_LABELS = ("gpu_uuid",)
MEMBER_LABELS = ("gpu_uuid", "member", "engine", "model_name")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """One metric.

    Attributes:
        figure: The attribute of the statistics that it shows.
        counter: It only grows while its member lives.
    """

    name: str
    help: str
    figure: str
    counter: bool = False


DEVICE_FAMILIES = (
    Family("kvcached_device_capacity_bytes", "Memory of the device.", "total_bytes"),
    Family("kvcached_device_headroom_bytes", "Left ungranted on the device.", "headroom_bytes"),
    Family("kvcached_device_free_bytes", "What the driver has left on the device.", "driver_free_bytes"),
    Family("kvcached_device_unleased_bytes", "What could be granted on the device now.", "unleased_bytes"),
)

MEMBER_FAMILIES = (
    Family("kvcached_resident_bytes", "KV memory that exists.", "resident_bytes"),
    Family("kvcached_lease_bytes", "KV memory granted and not returned.", "lease_bytes"),
    Family("kvcached_in_use_bytes", "KV memory that requests use.", "in_use_bytes"),
    Family("kvcached_free_bytes", "KV memory without content.", "free_bytes"),
    Family("kvcached_cached_bytes", "KV memory with cached prefixes only.", "cached_bytes"),
    Family("kvcached_demand_bytes", "KV memory that the member would use now.", "demand_bytes"),
    Family("kvcached_unmet_bytes", "KV memory asked for and not granted.", "unmet_bytes"),
    Family("kvcached_target_bytes", "KV memory that sharing says it should hold at most.", "target_bytes"),
    Family("kvcached_floor_bytes", "KV memory that it gets back whenever it needs it.", "floor_bytes"),
    Family("kvcached_ceiling_bytes", "KV memory that it never exceeds.", "ceiling_bytes"),
    Family("kvcached_static_lease_bytes", "Granted for weights, activations and graphs.", "static_lease_bytes"),
    Family("kvcached_static_used_bytes", "In use by weights, activations and graphs.", "static_used_bytes"),
    Family("kvcached_static_unmet_bytes", "Waited for to load weights.", "static_unmet_bytes"),
    Family("kvcached_trim_left_bytes", "Asked to trim and not trimmed yet.", "trim_left_bytes"),
    Family("kvcached_limits_revision", "Of the last limits an operator set; 0: as launched.", "limits_revision"),
    Family("kvcached_heartbeat_age_seconds", "Since the member last said anything.", "heartbeat_age_seconds"),
    Family("kvcached_maps_total", "Growths.", "maps_total", counter=True),
    Family("kvcached_unmaps_total", "Trims.", "unmaps_total", counter=True),
    Family("kvcached_mapped_bytes_total", "KV memory mapped.", "mapped_bytes_total", counter=True),
    Family("kvcached_unmapped_bytes_total", "KV memory unmapped.", "unmapped_bytes_total", counter=True),
    Family("kvcached_create_failures_total", "Refusals of the driver.", "create_failures_total", counter=True),
)

READABLE = Family("kvcached_ledger_readable", "1 while the ledger of the device can be read.", "")

_LARGEST_OF_RANKS = {"limits_revision", "heartbeat_age_seconds"}


@dataclass(frozen=True)
class Sample:
    """One number of one series."""

    family: Family
    labels: tuple[str, ...]
    value: float


class Reader:
    """Reads the ledgers of a directory for one engine. Safe to use from several threads.

    Args:
        runtime_dir: Where the ledgers are.
        engine_id: Whose members are read, those under ``ENGINE_ID/…`` too (a server with several engines); they may
            join later.
    """

    def __init__(self, runtime_dir: Path, engine_id: str) -> None:
        self._runtime_dir = runtime_dir
        self._engine_id = engine_id
        self._lock = threading.Lock()
        self._open: dict[str, Ledger] = {}
        self._devices: set[str] = set()

    def samples(self) -> list[Sample]:
        """Every number now: of the devices on which the engine has been a member, and of its members."""
        with self._lock:
            return [sample for device_id in Ledger.devices(self._runtime_dir) for sample in self._of_device(device_id)]

    def _of_device(self, device_id: str) -> Iterator[Sample]:
        device = self._snapshot(device_id)
        own = [member for member in device.members if self._is_own(member)] if device else []
        if own:
            self._devices.add(device_id)
        if device_id not in self._devices:
            return
        yield Sample(READABLE, (device_id,), float(device is not None))
        if device is None:
            return
        for family in DEVICE_FAMILIES:
            yield Sample(family, (device_id,), getattr(device, family.figure))
        for ranks in _by_name(own):
            labels = (device_id, ranks[0].name, ranks[0].engine, ranks[0].model)
            for family in MEMBER_FAMILIES:
                yield Sample(family, labels, _together(family.figure, ranks))

    def _is_own(self, member: MemberStatistics) -> bool:
        """A process may hold several engines of one id: each appends a part of its own."""
        return member.member_id.partition("/")[0] == self._engine_id

    def _owns(self, member: MemberStatistics) -> bool:
        return member.member_id.partition("/")[0] == self._engine_id

    def _snapshot(self, device_id: str) -> LedgerStatistics | None:
        known = self._open.get(device_id)
        if known is not None:
            try:
                return known.snapshot()
            except LedgerError:  # the file was replaced, or this process was forked: open it anew
                del self._open[device_id]
                known.close()
        try:
            self._open[device_id] = Ledger.open(device_id, None, runtime_dir=self._runtime_dir)
            return self._open[device_id].snapshot()
        except LedgerError as error:
            log.debug("The ledger of %s cannot be read: %s", device_id, error)
            return None


def _by_name(members: Iterable[MemberStatistics]) -> list[list[MemberStatistics]]:
    groups: dict[str, list[MemberStatistics]] = {}
    for member in members:
        groups.setdefault(member.name, []).append(member)
    return list(groups.values())


def _together(figure: str, ranks: list[MemberStatistics]) -> float:
    values = [float(getattr(rank, figure)) for rank in ranks]
    return max(values) if figure in _LARGEST_OF_RANKS else sum(values)


class Collector:
    """What prometheus_client's registry asks at each scrape."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would otherwise read the ledgers when this is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The samples, grouped into metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        metrics: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for sample in self._reader.samples():
            family = sample.family
            metric = metrics.get(family.name)
            if metric is None:
                kind = CounterMetricFamily if family.counter else GaugeMetricFamily
                metric = metrics[family.name] = kind(family.name, family.help, labels=labels_of(family))
            metric.add_metric(list(sample.labels), sample.value)
        return metrics.values()


class Publisher(threading.Thread):
    """Writes the samples into this process's file of Prometheus' multiprocess directory, until the process ends.

    A series cannot be taken out of such a file, so that of a member that has left is set to 0.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__(name="kvcached-metrics", daemon=True)
        self._reader = reader
        self._gauges: dict[str, Gauge] = {}
        self._last: set[tuple[Family, tuple[str, ...]]] = set()
        self._stopped = threading.Event()

    def run(self) -> None:
        while True:
            self.publish()
            if self._stopped.wait(PUBLISH_SECONDS):
                return

    def stop(self) -> None:
        """Publish no more."""
        self._stopped.set()
        self.join()

    def publish(self) -> None:
        """Write every number once."""
        samples = self._reader.samples()
        now = {(sample.family, sample.labels) for sample in samples}
        for family, labels in self._last - now:
            self._gauge(family).labels(*labels).set(0)
        for sample in samples:
            self._gauge(sample.family).labels(*sample.labels).set(sample.value)
        self._last = now

    def _gauge(self, family: Family) -> Gauge:
        from prometheus_client import Gauge

        if family.name not in self._gauges:
            self._gauges[family.name] = Gauge(
                family.name, family.help, labels_of(family), registry=None, multiprocess_mode="mostrecent"
            )
        return self._gauges[family.name]


def labels_of(family: Family) -> tuple[str, ...]:
    """The names of a metric's labels."""
    return MEMBER_LABELS if family in MEMBER_FAMILIES else DEVICE_LABELS


_registered: dict[tuple[Path, str], Collector | Publisher] = {}


def register(settings: Settings, *, environ: Mapping[str, str] = os.environ) -> bool:
    """Export this engine's members on its ``/metrics``, from now on and also those that join later.

    Call it in the process that serves ``/metrics`` (vLLM: every API server; a general plugin runs there before the
    endpoint is made) or, for SGLang, in each scheduler process, whose environment has the multiprocess directory. The
    launching process of SGLang is too early. Calling it again does nothing.

    Args:
        settings: ``runtime_dir`` and ``engine_id`` count.
        environ: Where prometheus_client looks for its multiprocess directory.

    Returns:
        Whether the figures will be shown. If not, a warning says why.
    """
    key = (settings.runtime_dir, settings.engine_id)
    known = _registered.get(key)
    if isinstance(known, Collector) or (known is not None and known.is_alive()):  # a fork leaves its threads behind
        return True
    reader = Reader(settings.runtime_dir, settings.engine_id)
    if environ.get(MULTIPROCESS_VARIABLE):
        return _publish(key, reader)
    from prometheus_client import REGISTRY

    _registered[key] = collector = Collector(reader)
    REGISTRY.register(collector)
    return True


def _publish(key: tuple[Path, str], reader: Reader) -> bool:
    from prometheus_client import values

    if values.ValueClass is values.MutexValue:
        log.warning(
            "%s was set after process %d had imported prometheus_client: kvcached's metrics are not exported from it",
            MULTIPROCESS_VARIABLE,
            os.getpid(),
        )
        return False
    _registered[key] = publisher = Publisher(reader)
    publisher.start()
    return True
