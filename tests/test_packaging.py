"""What is in the wheel, and how the package imports. setuptools drops a folder that is not listed without a word."""

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import wanfp4

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]
PACKAGES = PROJECT["tool"]["setuptools"]["packages"]
# Not packages of the product: tests, documents, and what tools leave behind.
NOT_SHIPPED = {"tests", "docs", "build", "dist", "out"}


def run_python(code, cwd):
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Names in a wheel built from a clean copy of the tracked and new files."""
    work = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    if not names:  # an unpacked source archive
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file() and ".venv" not in p.parts]
    for name in names:
        if (ROOT / name).is_file():
            (work / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (work / "source" / name).write_bytes((ROOT / name).read_bytes())
    # Without isolation: the backend is in the environment already, and a test should not need the network.
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(work)]
    subprocess.run([*command, str(work / "source")], check=True)
    [path] = work.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_the_wheel_test_leaves_no_part_out():
    script = (ROOT / ".ci" / "wheel-test").read_text(encoding="utf-8")
    chosen = re.search(r"set -- (.*?)\nfi\n", script, re.DOTALL)[1]
    command = f'tests={shlex.quote(str(ROOT / "tests"))}; printf "%s\n" {chosen}'
    said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [Path(line.partition("::")[0]) for line in said if line.startswith("/")]
    assert paths
    assert all(path.exists() for path in paths)
    parts = {path.relative_to(ROOT / "tests").parts[0] for path in paths}
    there = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    # What is not in a wheel, or only in one: documents, the tests' own pipeline, training of the sample model.
    assert there - parts == {"test_documents.py", "test_tiny.py", "samples"}


def test_every_folder_with_python_files_is_a_listed_package():
    expected = set()
    for file in ROOT.rglob("*.py"):
        place = file.parent.relative_to(ROOT)
        top = place.parts[0] if place.parts else "tests"
        if place.as_posix() == "kernels/bench":  # run from a checkout by who tunes kernels
            continue
        if top not in NOT_SHIPPED and not top.startswith(".") and not (ROOT / top / "pyvenv.cfg").exists():
            expected.add(place.as_posix())
    assert set(FOLDERS.values()) == expected
    assert sorted(FOLDERS) == sorted(PACKAGES)


def test_kernels_is_no_package_so_that_hugging_faces_stays_visible():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_wheel_holds_every_module_of_the_tree(wheel):
    for package, folder in FOLDERS.items():
        for file in (ROOT / folder).glob("*.py"):
            assert f"{package.replace('.', '/')}/{file.name}" in wheel


def test_the_wheel_holds_what_is_not_python(wheel):
    assert "wanfp4/py.typed" in wheel
    for folder, pattern in (("samples/pipeline", "**/*"), ("quality", "*.j2")):
        files = [file for file in (ROOT / folder).glob(pattern) if file.is_file()]
        assert files
        for file in files:
            assert f"wanfp4/{file.relative_to(ROOT).as_posix()}" in wheel
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)


def test_the_wheel_holds_nothing_at_top_level_but_wanfp4(wheel):
    assert {name.partition("/")[0] for name in wheel} == {"wanfp4", f"wanfp4-{wanfp4.__version__}.dist-info"}


def test_the_installed_version_is_the_packages_own():
    assert version("wanfp4") == wanfp4.__version__


def test_import_is_cheap(tmp_path):
    code = (
        "import sys, wanfp4; print({'torch', 'diffusers', 'numpy'} & set(sys.modules)); wanfp4.policies()['wan-fast']"
    )
    assert run_python(code, tmp_path) == "set()\n"


def test_every_public_name_is_there(tmp_path):
    code = "import wanfp4; print([name for name in wanfp4.__all__ if not hasattr(wanfp4, name)])"
    assert run_python(code, tmp_path) == "[]\n"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_imports_from_anywhere(tmp_path, package):
    run_python(f"import {package}", tmp_path)


def test_diffusers_pipelines_import_beside_it(tmp_path):
    run_python("import wanfp4.kernels.dispatch; from diffusers import WanPipeline", tmp_path)


def test_the_bundled_pipeline_is_where_bundled_says(tmp_path):
    code = "from wanfp4.samples import bundled; print((bundled() / 'model_index.json').is_file())"
    assert run_python(code, tmp_path) == "True\n"


def test_constraints_pin_every_dependency():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, pinned = line.partition("==")
            assert pinned, f"{line!r} is no pin"
            assert "/" not in line, f"{line!r} names a place"
            pins[name.lower().replace("_", "-")] = pinned
    wanted = list(PROJECT["project"]["dependencies"])
    for extra in ("test", "lint", "build"):
        wanted += PROJECT["project"]["optional-dependencies"][extra]
    for requirement in wanted:
        assert requirement.partition(">=")[0].lower() in pins
