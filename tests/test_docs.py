"""Pages that lead nowhere, found before their readers do."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_that_are_committed(page):
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")
    files = {(ROOT / name).resolve() for name in listed.splitlines()}
    paths = files | {folder for file in files for folder in file.parents}
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)", text)
    dead = [link for link in links if "://" not in link and ((ROOT / page).parent / link).resolve() not in paths]
    assert not dead


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.(?:md|py)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {*PAGES, "docs/tutorial.py"}
    assert {page.removeprefix("docs/") for page in pages if page.startswith("docs/")} == listed


def test_the_tables_of_speed_are_of_all_that_was_measured():
    table = runpy.run_path(str(ROOT / "benchmarks" / "speed" / "table.py"))
    assert {part.__name__ for part in table["PARTS"]} == {file.stem for file in table["RESULTS"].glob("*.json")}
    page = table["PERFORMANCE"]
    assert page.read_text(encoding="utf-8") == table["page"](), "python benchmarks/speed/table.py writes it anew"


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_bytes()) < 6000
