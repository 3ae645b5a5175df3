from pathlib import Path
from typing import Any

import pytest

from pearl.reports.settings import REGISTRIES, SECTIONS, markdown, part_page, section_page
from pearl.settings.config import RunConfig

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_of_settings_is_the_codes() -> None:
    assert DOCS.read_text() == markdown(), "write it anew: python -m pearl.reports.settings > docs/settings.md"


@pytest.mark.parametrize("kind", [RunConfig, *SECTIONS.values()], ids=lambda kind: kind.__name__)
def test_every_setting_is_described(kind: Any) -> None:
    assert not [key for key, field in kind.model_fields.items() if not field.description]


def test_a_section_is_shown_with_what_may_stand_there(cli: Any) -> None:
    out, _ = cli("show", "stream")
    assert out == section_page("stream") + "\n"
    assert 'stream.evaluate_on = "test"   (test | validation)' in out
    assert "stream.validation = 0.0   (number, at least 0, below 1)" in out
    assert "stream.tasks = (needed)" in out


def test_options_stand_with_their_defaults() -> None:
    page = part_page(REGISTRIES["methods"], "er")
    assert page.startswith("method er\n") and "  buffer_size = 200" in page
