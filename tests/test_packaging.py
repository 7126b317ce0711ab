"""Every way to install finds the kernels; importing costs nothing and touches no GPU."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRAS = {"cuda12", "cuda13", "cublas12", "cublas13", "test", "bench", "plot", "demo", "dev"}
SHARED_LIBRARIES = "cupy torch jax".split()

# Runs before the code of a child process: these modules cannot be imported there.
WITHOUT_CUPY = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {["cupy", "cupy_backends", "cupyx", "torch", "jax"]}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""

KERNEL_FILES = """
from cupyflash.compiler import kernel_dir
print(*sorted(path.relative_to(kernel_dir()).as_posix() for path in kernel_dir().rglob("*.cuh")), sep="\\n")
"""

NUMPY_CALL = """
import numpy as np
import cupyflash
x = np.ones((1, 3, 2, 4), np.float32)
assert np.array_equal(cupyflash.attention(x, x, x), x)
"""

# An array that says it lies on GPU 0 (DLPack's device type 2).
GPU_CALL = """
import numpy as np
import cupyflash
class Exporter:
    shape, ndim, dtype = (1, 3, 2, 4), 4, np.dtype(np.float16)
    def __array_namespace__(self):
        return np
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, **options):
        raise AssertionError("not reached: there is no GPU")
try:
    cupyflash.attention(Exporter(), Exporter(), Exporter())
except (ImportError, RuntimeError) as error:
    print(error)
"""


def python(code, *paths, **environment):
    """What ``code`` prints in a fresh interpreter that looks in ``paths`` first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **environment}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=Path(sys.prefix), capture_output=True, timeout=120
    )
    assert process.returncode == 0, process.stderr.decode(errors="replace")
    return process.stdout.decode()


def build(kind, source, target):
    """Build "wheel", "sdist" or "editable" from ``source`` without a network; the path of what was built."""
    target.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=120)
    return next(target.iterdir())


def kernel_files():
    return sorted(path.relative_to(ROOT / "kernels").as_posix() for path in (ROOT / "kernels").rglob("*.cuh"))


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the tree: building leaves files behind."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source")
    for path in (*map(ROOT.joinpath, ("setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE")), *ROOT.glob("*.md")):
        shutil.copy(path, source)
    for name in ("cupyflash", "kernels", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("built") / "wheel")


@pytest.fixture(scope="module")
def version():
    for node in ast.parse((ROOT / "cupyflash/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "__version__":
            return ast.literal_eval(node.value)


def test_wheel_holds_every_source_file_and_is_small(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {f"cupyflash/kernels/{name}" for name in kernel_files()} <= names
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "cupyflash").rglob("*.py")} <= names
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 300_000


@pytest.fixture(scope="module")
def unpacked_sdist(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(build("sdist", source, folder / "sdist")) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder / "tree")
    return next((folder / "tree").iterdir())


def test_sdist_holds_the_sources_the_tests_and_the_documents(unpacked_sdist):
    def files(root):
        return {
            path.relative_to(root).as_posix()
            for pattern in ("*.md", "LICENSE", "cupyflash/**/*.py", "kernels/**/*.cuh", "tests/*.py", "tests/*.json")
            for path in root.glob(pattern)
        }

    assert files(unpacked_sdist) == files(ROOT)


def test_sdist_builds_the_same_wheel(unpacked_sdist, wheel, tmp_path):
    again = build("wheel", unpacked_sdist, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


def test_metadata(wheel, version):
    metadata = metadata_of(wheel)
    assert metadata["Version"] == version
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra")) == EXTRAS
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0] for line in required} == {"numpy", "ml_dtypes"}


def test_version_is_the_same_everywhere(version):
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert python("import cupyflash; print(cupyflash.__version__)", ROOT).strip() == version
    try:
        installed = importlib.metadata.version("cupyflash")
    except importlib.metadata.PackageNotFoundError:
        return
    assert installed == version, "an older version is installed: run pip install -e . again"


def test_cuda_extras_are_lean_and_recent_enough():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for major in "12", "13":
        cupy, toolkit = setup["options.extras_require"][f"cuda{major}"].split()
        assert cupy == f"cupy-cuda{major}x>=14.2"
        assert toolkit.startswith("cuda-toolkit[cudart,nvrtc]>=")


def test_kernels_are_found_in_a_wheel(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    assert python(KERNEL_FILES, tmp_path).split() == kernel_files()


def test_kernels_are_found_in_an_editable_install(source, tmp_path):
    with zipfile.ZipFile(build("editable", source, tmp_path / "editable")) as archive:
        archive.extractall(tmp_path / "site")
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
    assert python(code + KERNEL_FILES).split() == kernel_files()


def test_kernels_are_found_in_tree():
    assert python(KERNEL_FILES, ROOT).split() == kernel_files()


def test_paths_outside_ascii(wheel, tmp_path):
    site = tmp_path / "pläts 場所"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    c_locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert python(NUMPY_CALL + KERNEL_FILES, site, **c_locale).split() == kernel_files()


def test_kernel_source_is_ascii():
    for path in (ROOT / "kernels").rglob("*.cuh"):
        assert path.read_bytes().isascii(), path


def test_import_loads_no_gpu_library():
    code = "import cupyflash, sys; print(*sys.modules)"
    loaded = {name.split(".")[0] for name in python(code, ROOT).split()}
    assert loaded.isdisjoint(SHARED_LIBRARIES)


def test_numpy_arrays_need_no_cupy():
    python(WITHOUT_CUPY + NUMPY_CALL, ROOT)


def test_gpu_call_without_cupy_names_the_extra():
    assert 'pip install "cupyflash[cuda1' in python(WITHOUT_CUPY + GPU_CALL, ROOT)


def test_gpu_call_without_gpu_says_so():
    assert re.search("GPU|driver|CUDA", python(GPU_CALL, ROOT, CUDA_VISIBLE_DEVICES=""))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and forks")
def test_import_starts_no_cuda_so_that_a_fork_can():
    code = """
import os
import cupyflash
assert "libcuda" not in open("/proc/self/maps").read()
child = os.fork()
if child == 0:
    try:
        import cupy as xp
        xp.cuda.runtime.getDeviceCount()
        dtype = "float16"
    except Exception:
        import numpy as xp
        dtype = "float32"
    x = xp.ones((1, 3, 2, 4), dtype)
    os._exit(0 if bool((cupyflash.attention(x, x, x) == x).all()) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    python(code, ROOT)
