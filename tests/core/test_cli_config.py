"""kvcached config: each setting with its value, its source and its form."""

from __future__ import annotations

from pathlib import Path

from kvcached_core.cli.config import configuration
from kvcached_core.config import Settings, variable_of

from tests.core.command import kvcached, kvcached_here


def test_every_setting_that_a_person_may_set_is_shown_with_its_source(runtime_dir: Path) -> None:
    environ = {"ENABLE_KVCACHED": "yes", "KVCACHED_FLOOR": "1024MiB", "KVCACHED_WEIGHT": "2.50"}
    done = kvcached("config", "--json", runtime_dir=runtime_dir, environ=environ)
    settings = {each["variable"]: each for each in done.document["settings"]}
    assert set(settings) == {variable_of(field) for field in Settings.model_fields} - {"KVCACHED_ENGINE_ID"}
    assert (settings["ENABLE_KVCACHED"]["value"], settings["ENABLE_KVCACHED"]["source"]) == ("1", "environment")
    assert settings["KVCACHED_FLOOR"]["value"] == "1GiB"
    assert settings["KVCACHED_WEIGHT"]["value"] == "2.5"
    assert settings["KVCACHED_RUNTIME_DIR"] | {"meaning": "", "accepted": ""} == {
        "variable": "KVCACHED_RUNTIME_DIR",
        "value": str(runtime_dir),
        "source": "environment",
        "meaning": "",
        "accepted": "",
    }
    assert (settings["KVCACHED_CEILING"]["value"], settings["KVCACHED_CEILING"]["source"]) == (None, "default")
    assert all(each["accepted"] and each["meaning"] for each in settings.values())


def test_an_empty_variable_counts_as_not_set() -> None:
    (strict,) = (each for each in configuration({"KVCACHED_STRICT": ""}).settings if each.variable == "KVCACHED_STRICT")
    assert (strict.value, strict.source) == ("0", "default")


def test_as_text_no_name_and_no_form_is_cut(runtime_dir: Path) -> None:
    done = kvcached_here("config", runtime_dir=runtime_dir)
    assert all(variable_of(field) in done.out for field in Settings.model_fields if field != "engine_id")
    assert "…" not in done.out
