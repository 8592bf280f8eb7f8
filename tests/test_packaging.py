"""What an installation contains, once from a wheel and once editable, each in a virtual environment of its own.

The environments see the packages of the current one (TensorFlow is not installed again) and nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import tfpar

ROOT = Path(__file__).parent.parent
PARTS = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "tfpar", "strategies", "models", "tests")
PIP = ("-m", "pip", "--disable-pip-version-check", "-qq")
OFFLINE = ("--no-index", "--no-deps", "--no-build-isolation")

PROBE = """
import importlib.metadata, importlib.util, json
from pathlib import Path
import tfpar, tfpar.strategies, tfpar.strategies.hybrid, tfpar.models.gpt, tfpar.models.gpt_layouts

print(json.dumps({
    "tfpar": tfpar.__file__,
    "tfpar.strategies": tfpar.strategies.hybrid.__file__,
    "tfpar.models": tfpar.models.gpt.__file__,
    "py.typed": str(Path(tfpar.__file__).with_name("py.typed")),
    "version": importlib.metadata.version("tfpar"),
    "generic": [name for name in ("strategies", "models", "tests") if importlib.util.find_spec(name)],
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command without PYTHONPATH and returns what it prints; its errors become the test's."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of the repository's sources, so that building leaves nothing in the repository."""
    target = tmp_path / "source"
    target.mkdir()
    for part in filter(Path.exists, (ROOT / name for name in PARTS)):
        if part.is_dir():
            shutil.copytree(part, target / part.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(part, target)
    return target


@pytest.fixture
def environment(tmp_path) -> Path:
    """A new virtual environment's folder; the current environment's packages come after its own."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (own / "packages.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def probe(environment: Path) -> dict:
    """What an interpreter of the environment finds, started in a folder that is not the source's."""
    return json.loads(run(environment / "bin" / "python", "-c", PROBE, cwd=environment))


def build_wheel(environment: Path, source: Path) -> Path:
    """Builds the wheel."""
    wheels = source.parent / "wheels"
    run(environment / "bin" / "python", *PIP, "wheel", *OFFLINE, "-w", wheels, source, cwd=environment)
    (wheel,) = wheels.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_wheel(environment, source):
    wheel = build_wheel(environment, source)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"tfpar", f"tfpar-{tfpar.__version__}.dist-info"}
    for part, prefix in (("tfpar", "tfpar"), ("strategies", "tfpar/strategies"), ("models", "tfpar/models")):
        for file in (ROOT / part).rglob("*.py"):
            assert f"{prefix}/{file.relative_to(ROOT / part).as_posix()}" in names
    run(environment / "bin" / "python", *PIP, "install", *OFFLINE, "--ignore-installed", wheel, cwd=environment)
    found = probe(environment)
    for name in ("tfpar", "tfpar.strategies", "tfpar.models"):
        assert Path(found[name]).is_relative_to(environment)
        assert Path(found[name]).parent.parts[-name.count(".") - 1 :] == tuple(name.split("."))
    assert Path(found["py.typed"]).is_file()
    assert found["version"] == tfpar.__version__
    assert not found["generic"]


@pytest.mark.slow
@pytest.mark.long  # it is how `make test` itself installs
def test_editable(environment, source):
    install = ("install", *OFFLINE, "--ignore-installed", "-e", source)
    run(environment / "bin" / "python", *PIP, *install, cwd=environment)
    found = probe(environment)
    assert Path(found["tfpar"]).parent == source / "tfpar"
    assert Path(found["tfpar.strategies"]).parent == source / "strategies"
    assert Path(found["tfpar.models"]).parent == source / "models"
    assert Path(found["py.typed"]).is_file()
    assert found["version"] == tfpar.__version__
    assert not found["generic"]
