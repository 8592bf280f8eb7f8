"""What the documents say: examples run and print what they show, links lead somewhere, quoted sentences are in the code."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import tfpar

ROOT = Path(__file__).parent.parent
PACKAGES = {"tfpar": "tfpar", "strategies": "tfpar.strategies", "models": "tfpar.models"}
SOURCES = {
    ".".join(
        [PACKAGES[folder], *(part for part in file.relative_to(ROOT / folder).with_suffix("").parts if part != "__init__")]
    ): file
    for folder in PACKAGES
    for file in sorted((ROOT / folder).rglob("*.py"))
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    """A page's path, for the names of tests."""
    return str(page.relative_to(ROOT))


# Docstrings


@pytest.mark.parametrize("module", SOURCES)
def test_docstring_examples(module):
    runner = doctest.DocTestRunner()
    globs = {"np": np, "keras": keras, "tfpar": tfpar}
    for test in doctest.DocTestFinder().find(importlib.import_module(module), extraglobs=globs):
        runner.run(test)
    assert not runner.failures


@pytest.mark.parametrize("public", tfpar.__all__)
def test_public_names_have_an_example(public):
    assert doctest.DocTestParser().get_examples(getattr(tfpar, public).__doc__ or "")


# Code blocks


def blocks(text: str) -> Iterator[tuple[str, int, str]]:
    """The kind, first line number and text of each fenced block."""
    for match in BLOCK.finditer(text):
        yield match[1], text[: match.start(2)].count("\n"), match[2]


def script(text: str) -> str:
    """All Python blocks of a page as one program, on the lines where they stand in the page."""
    lines = [""] * (text.count("\n") + 1)
    for kind, first, block in blocks(text):
        if kind == "python":
            lines[first : first + block.count("\n")] = block.splitlines()
    return "\n".join(lines)


def shown_outputs(text: str) -> list[str]:
    """Text blocks that stand right behind a Python block: what it prints, with … for what is left out."""
    found = list(BLOCK.finditer(text))
    pairs = zip(found, found[1:])
    return [b[2] for a, b in pairs if (a[1], b[1]) == ("python", "text") and not text[a.end() : b.start()].strip()]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if script(page.read_text()).strip()], ids=name)
def test_code_blocks_run_and_print_what_is_shown(page, tmp_path):
    program = tmp_path / f"{page.stem}.py"
    program.write_text(script(page.read_text()))
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(
        [sys.executable, program.name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rest = done.stdout
    for shown in shown_outputs(page.read_text()):
        pattern = ".*?".join(map(re.escape, shown.strip().split("…")))
        match = re.search(pattern, rest, re.DOTALL)
        assert match, f"{name(page)} shows\n{shown}\nbut what is left of its output is\n{rest}"
        rest = rest[match.end() :]


# Links and sentences


def anchors(page: Path) -> set[str]:
    """The names by which links reach a page's headings, as GitHub makes them."""
    prose = BLOCK.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def sentences_in_the_code() -> list[str]:
    """All texts of the package's sources, with … for what is filled in."""
    texts = []
    for file in SOURCES.values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_quoted_sentences_are_in_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    own = page.split("## Sentences of tfpar")[1].split("\n## ")[0]
    quoted = re.findall(r"^\| `(.+?)` \|", own, re.MULTILINE)
    assert len(quoted) > 20
    texts = sentences_in_the_code()
    for sentence in quoted:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in sentence.split("…")))
        assert any(pattern.search(text) for text in texts), sentence


def test_no_file_names_a_place_on_this_machine():
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    places = [str(place) for place in {ROOT, Path.home()} if len(place.parts) > 1]
    pattern = re.compile("|".join(rf"(?<![\w./]){re.escape(place)}(?![\w-])" for place in places))
    for file in filter(Path.is_file, (ROOT / file for file in files if file)):
        content = file.read_bytes()
        if b"\0" not in content:
            assert not pattern.search(content.decode(errors="replace")), name(file)
