"""The hook names a package whose YAML files are installed with it."""

from __future__ import annotations

from importlib.resources import files

import quick_presets
import yaml


def test_the_presets_are_there() -> None:
    (package,) = quick_presets.inferlab_presets()
    found = {path.name: path for group in ("load", "experiment") for path in (files(package) / group).iterdir()}
    assert found.keys() == {"short_chats.yaml", "low_latency.yaml"}
    load = yaml.safe_load(found["short_chats.yaml"].read_text())
    assert load["defaults"] == ["base_load"], "typed by the core's own settings: a misspelt name is an error"
    assert yaml.safe_load(found["low_latency.yaml"].read_text())["scheduler"] == {"max_chunk": 256}
