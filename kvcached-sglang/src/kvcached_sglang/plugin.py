"""The entry point ``sglang.srt.plugins``: SGLang calls `register` first thing in each of its processes."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping

from kvcached_core.config import ENABLE, Settings, variable_of
from kvcached_core.errors import ConfigError, UnsupportedError
from kvcached_core.logs import inactive_line

from kvcached_sglang import hooks, releases
from kvcached_sglang.refusals import BALANCE_CHECK

log = logging.getLogger(__name__)

ENGINE = "SGLang"


def register() -> None:
    """Hook this process, if kvcached is asked for.

    Never raises but ``SystemExit``, which SGLang does not swallow: where settings are wrong, and in strict mode where
    kvcached cannot be active.
    """
    if not os.environ.get(ENABLE):
        return
    try:
        settings = Settings.load(os.environ)
    except ConfigError as error:
        raise SystemExit(f"kvcached: {error}") from error
    if not settings.enabled:
        return
    for package in ("kvcached_core", "kvcached_sglang"):
        logging.getLogger(package).setLevel(settings.log_level)
    try:
        _hook(_with_engine_id(settings, os.environ))
    except UnsupportedError as error:
        run_natively(settings, str(error))


def run_natively(settings: Settings, reason: str) -> None:
    """Say that kvcached is off, and why; in strict mode end the process."""
    line = inactive_line(engine=ENGINE, reason=reason)
    if settings.strict:
        raise SystemExit(line)
    log.error(line)


def _with_engine_id(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """An id for this engine, which the processes that it starts inherit: its ranks are one member."""
    if settings.engine_id:
        return settings
    engine_id = uuid.uuid4().hex
    os.environ[variable_of("engine_id")] = engine_id
    return settings.model_copy(update={"engine_id": engine_id})


def _hook(settings: Settings) -> None:
    import sglang
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not releases.judge(sglang.__version__, allow_untested=settings.allow_untested):
        log.warning("SGLang %s is newer than this kvcached has been tested with; its hooks fit", sglang.__version__)
    hooks.verify()
    from kvcached_sglang.handlers import Plugin

    os.environ.setdefault(BALANCE_CHECK, "0")
    plugin = Plugin(settings, sglang.__version__, run_natively)
    for hook in hooks.HOOKS:
        HookRegistry.register(hook.target, getattr(plugin, hook.handler), HookType[hook.kind])
