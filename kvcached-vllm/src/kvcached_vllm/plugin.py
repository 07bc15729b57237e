"""The entry points that vLLM calls: one chooses the platform, one checks in every process that it was chosen.

A probe never raises: vLLM would log it and go on natively without another word. What is wrong is one ERROR line,
and in strict mode the end of the process.
"""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path

from kvcached_core import logs, metrics
from kvcached_core.config import Settings, with_engine_id
from kvcached_core.errors import ConfigError, KvcachedError, UnsupportedError
from kvcached_core.installation import upstream_package

from kvcached_vllm import contract, qualnames, releases

log = logging.getLogger(__name__)


def platform() -> str | None:
    """Entry point of ``vllm.platform_plugins``: the qualified name of our platform, or None to stay out of it."""
    settings = _settings()
    if not settings.enabled:
        return None
    try:
        _refuse_upstream()
        _judge_release(settings)
        return _wrapped_platform()
    except KvcachedError as error:
        inactive(settings, str(error))
        return None


def general() -> None:
    """Entry point of ``vllm.general_plugins``: in every process, make sure that what was asked for is active.

    One of them serves ``/metrics``, so each registers ours; elsewhere nobody looks at them.
    """
    settings = _settings()
    if not settings.enabled:
        return
    from vllm.platforms import current_platform

    from kvcached_vllm.platform import ElasticPlatform

    if isinstance(current_platform, ElasticPlatform):
        metrics.register(with_engine_id(settings))
    elif not _say_inactive.cache_info().currsize:  # else the probe has said it
        inactive(
            settings,
            f"vLLM chose {type(current_platform).__qualname__} instead of kvcached's platform. See the lines above; "
            "VLLM_PLUGINS must name kvcached, VLLM_TARGET_DEVICE must be unset, and no other platform plugin may be "
            "active.",
        )


def inactive(settings: Settings, reason: str) -> None:
    """Say that kvcached is asked for and not active; in strict mode end the process.

    Raises:
        SystemExit: In strict mode. vLLM swallows `Exception` here, and nothing else.
    """
    _say_inactive(reason)
    if settings.strict:
        sys.exit(1)


@functools.cache
def _say_inactive(reason: str) -> None:
    """Once per process: vLLM asks for its platform, and updates a configuration, more often than that."""
    log.error(logs.inactive_line(engine="vLLM", reason=reason))


def _settings() -> Settings:
    """The settings; a wrong one ends the process, since what was meant cannot be guessed."""
    _follow_vllm_log("INFO")
    try:
        settings = Settings.load()
    except ConfigError as error:
        log.error("kvcached: %s", error)
        sys.exit(2)
    _follow_vllm_log(settings.log_level)
    return settings


def _follow_vllm_log(level: str) -> None:
    import vllm.logger

    logs.follow(logging.getLogger(vllm.logger.__name__.partition(".")[0]), level, __package__)


def _refuse_upstream() -> None:
    if (found := upstream_package()) is not None:
        raise UnsupportedError(f"{found} is installed beside it and patches vLLM by itself: uninstall one of the two.")


def _judge_release(settings: Settings) -> None:
    import vllm

    engine = releases.judge(vllm.__version__, allow_untested=settings.allow_untested)
    if not engine.tested:
        contract.require(Path(vllm.__file__).parents[1], engine.version)
        log.warning(
            "kvcached has not been tested with vLLM %s; what it relies on is there, and it was asked to try",
            engine.version,
        )


def _wrapped_platform() -> str:
    from vllm.platforms import builtin_platform_plugins

    if builtin_platform_plugins["cuda"]() is not None:
        return qualnames.CUDA_PLATFORM
    if builtin_platform_plugins["cpu"]() is not None:
        return qualnames.CPU_PLATFORM
    raise UnsupportedError("kvcached works on CUDA and, for tests, on the CPU build of vLLM; neither was found here.")
