from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest
from kvcached_core.config import Accepted, Settings, default_runtime_dir, variable_of
from kvcached_core.errors import ConfigError
from kvcached_core.sizes import Size
from pydantic import ValidationError


def test_nothing_set_means_off_and_the_defaults() -> None:
    settings = Settings.load({"PATH": "/bin", "VLLM_LOGGING_LEVEL": "DEBUG"})
    assert not settings.enabled
    assert not settings.strict
    assert settings.weight == 1.0
    assert settings.guard
    assert settings.floor is settings.ceiling is settings.headroom is settings.name is None
    assert settings.cache_floor == Size(num_bytes=0)
    assert settings.runtime_dir == default_runtime_dir() == Path(f"/dev/shm/kvcached-{os.geteuid()}")


def test_every_setting_is_read() -> None:
    settings = Settings.load(
        {
            "ENABLE_KVCACHED": "1",
            "KVCACHED_STRICT": "true",
            "KVCACHED_ALLOW_UNTESTED": "on",
            "KVCACHED_NAME": "qwen3-0.6b",
            "KVCACHED_FLOOR": "512MiB",
            "KVCACHED_CEILING": "25%",
            "KVCACHED_WEIGHT": "2.5",
            "KVCACHED_PAGE_SIZE": "32MiB",
            "KVCACHED_LAYOUT": "token-major",
            "KVCACHED_HEADROOM": "1GiB",
            "KVCACHED_CACHE_FLOOR": "1GiB",
            "KVCACHED_CACHE_CEILING": "3GiB",
            "KVCACHED_HOST_BUDGET": "4GiB",
            "KVCACHED_RUNTIME_DIR": "/run/kvcached",
            "KVCACHED_LOG_LEVEL": "DEBUG",
            "KVCACHED_GUARD": "0",
            "KVCACHED_ENGINE_ID": "a1b2",
        }
    )
    assert settings == Settings(
        enabled=True,
        strict=True,
        allow_untested=True,
        name="qwen3-0.6b",
        floor=Size(num_bytes=512 * 2**20),
        ceiling=Size(share=Fraction(1, 4)),
        weight=2.5,
        page_size=Size(num_bytes=2**25),
        layout="token-major",
        headroom=Size(num_bytes=2**30),
        cache_floor=Size(num_bytes=2**30),
        cache_ceiling=Size(num_bytes=3 * 2**30),
        host_budget=Size(num_bytes=2**32),
        runtime_dir=Path("/run/kvcached"),
        log_level="DEBUG",
        guard=False,
        engine_id="a1b2",
    )
    assert settings.model_fields_set == set(Settings.model_fields)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("KVCACHED_FLOR", "KVCACHED_FLOOR"),
        ("KVCACHED_CIELING", "KVCACHED_CEILING"),
        ("KVCACHED_ENABLE", "ENABLE_KVCACHED"),
        ("KVCACHED_CEILING_CACHE", "KVCACHED_CACHE_CEILING"),
        ("KVCACHED_floor", "KVCACHED_FLOOR"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Settings.load({name: "1"})
    assert str(refusal.value) == f"{name} is not a setting. Did you mean {nearest}?"


def test_an_unknown_name_is_refused_even_when_empty_and_all_are_named() -> None:
    with pytest.raises(ConfigError) as refusal:
        Settings.load({"KVCACHED_WAIGHT": "", "KVCACHED_FLOR": "1"})
    assert "KVCACHED_WEIGHT?" in str(refusal.value)
    assert "KVCACHED_FLOOR?" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENABLE_KVCACHED", "2"),
        ("ENABLE_KVCACHED", "enabled"),
        ("KVCACHED_STRICT", "y es"),
        ("KVCACHED_FLOOR", "12G"),
        ("KVCACHED_CEILING", "80 %"),
        ("KVCACHED_HEADROOM", "-1"),
        ("KVCACHED_CACHE_FLOOR", "150%"),
        ("KVCACHED_WEIGHT", "0"),
        ("KVCACHED_WEIGHT", "-1"),
        ("KVCACHED_WEIGHT", "nan"),
        ("KVCACHED_WEIGHT", "1001"),
        ("KVCACHED_WEIGHT", "heavy"),
        ("KVCACHED_NAME", "a b"),
        ("KVCACHED_NAME", "-a"),
        ("KVCACHED_NAME", "a" * 56),
        ("KVCACHED_RUNTIME_DIR", "run"),
        ("KVCACHED_LOG_LEVEL", "LOUD"),
    ],
)
def test_a_value_out_of_form_is_refused_with_value_and_form(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Settings.load({name: value})
    [field] = [field for field in Settings.model_fields if variable_of(field) == name]
    assert str(refusal.value) == f"{name}={value!r} is refused. Accepted: {_form(field)}."


def test_all_refused_values_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        Settings.load({"KVCACHED_FLOOR": "12G", "KVCACHED_WEIGHT": "0"})
    assert str(refusal.value).count("is refused") == 2


def test_an_empty_value_counts_as_not_set() -> None:
    settings = Settings.load({"ENABLE_KVCACHED": "", "KVCACHED_CEILING": ""})
    assert settings == Settings()
    assert settings.model_fields_set == set()


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Settings().weight = 2.0  # type: ignore[misc]


def test_every_setting_has_a_description_and_an_accepted_form() -> None:
    for field, info in Settings.model_fields.items():
        assert info.description, field
        assert _form(field), field


def _form(field: str) -> str:
    return next(note.form for note in Settings.model_fields[field].metadata if isinstance(note, Accepted))
