"""The documents: their Python code runs, their links lead somewhere, pictures are well formed."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import streamlap

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(<!-- gpu -->\n+)?```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)[^)]*\)")


def blocks():
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(2)) + 1
            marks = [pytest.mark.gpu] if match[1] else []
            code = "\n" * (line - 1) + match[2]  # so that a traceback gives the page's line
            yield pytest.param(page, code, id=f"{page.name}:{line}", marks=marks)


@pytest.mark.parametrize(("page", "code"), list(blocks()))
def test_code_runs(page, code):
    exec(compile(code, page, "exec"), {"__name__": "example"})


def test_every_python_block_is_found():
    # A block in a list or with other words after the fence would never run.
    for page in PAGES:
        text = page.read_text()
        assert text.lower().count("```py") == len(BLOCK.findall(text)), page


def test_the_readme_names_what_exists_and_nothing_else():
    text = (ROOT / "README.md").read_text()
    for name in re.findall(r"\bstreamlap\.(\w+)", text):
        assert name in streamlap.__all__
    table = text.split("## The API on one screen")[1].split("\n## ")[0]
    classes_of_errors = {
        name
        for name in streamlap.__all__
        if isinstance(getattr(streamlap, name), type)
        and issubclass(getattr(streamlap, name), Exception)
    }
    for name in set(streamlap.__all__) - classes_of_errors - {"__version__"}:
        assert f"`{name}" in table, f"{name} is missing in the README's table"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_changelog_knows_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [heading for heading in headings if heading != "Unreleased"]
    assert versions[0] == streamlap.__version__


def test_pictures_are_well_formed_and_described():
    for picture in (ROOT / "docs").glob("*.svg"):
        root = ElementTree.parse(picture).getroot()
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
        assert root.find("{http://www.w3.org/2000/svg}desc") is not None
