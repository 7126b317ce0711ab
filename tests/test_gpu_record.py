"""The record of the last run on a GPU belongs to this tree and holds no failure."""

import json
from types import SimpleNamespace

import conftest
import pytest
import tools

RECORD = tools.ROOT / "tests" / "gpu_record.json"


def test_record_matches_the_tree(request):
    if request.config.getoption("gpu_record"):
        pytest.skip("this run writes the record")
    assert RECORD.exists(), f"no {RECORD.name}: run pytest --gpu-record on a GPU"
    record = json.loads(RECORD.read_text())
    if "stale" in record:
        pytest.skip(f"{RECORD.name} is stale: {record['stale']}")
    assert record["sha256"] == tools.tree_digest(), (
        f"{RECORD.name} of {record['date']} is of another tree: run pytest --gpu-record on a GPU"
    )
    assert record["failed"] == 0
    assert record["passed"] > 0
    assert set(record["paths"]) >= set(tools.CUDA_PATHS)


def test_digest_sees_every_change(tmp_path):
    (tmp_path / "cupyflash").mkdir()
    (tmp_path / "kernels" / "core").mkdir(parents=True)
    source, kernel = tmp_path / "cupyflash" / "a.py", tmp_path / "kernels" / "core" / "a.cuh"
    source.write_text("x = 1\n")
    kernel.write_text("int x;\n")
    digests = [tools.tree_digest(tmp_path)]
    kernel.write_text("int y;\n")
    digests.append(tools.tree_digest(tmp_path))
    source.rename(source.with_name("b.py"))
    digests.append(tools.tree_digest(tmp_path))
    (tmp_path / "kernels" / "empty.cuh").touch()
    digests.append(tools.tree_digest(tmp_path))
    assert len(set(digests)) == 4
    (tmp_path / "kernels" / "notes.txt").touch()
    assert tools.tree_digest(tmp_path) == digests[-1]


def test_a_run_that_ends_early(tmp_path, monkeypatch):
    """A test whose process died has failed, though its setup had passed; the record says that others did not run."""
    monkeypatch.setattr(conftest, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(conftest, "_versions", dict)
    option = SimpleNamespace(keyword="", markexpr="gpu")
    session = SimpleNamespace(config=SimpleNamespace(option=option, args=["tests"]), shouldstop=False)
    plugin = conftest.GpuRecord()
    for name, outcome, keywords in (("a", "passed", {"gpu": 1}), ("b", "passed", {"gpu": 1}), ("b", "failed", {})):
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=name, outcome=outcome, keywords=keywords))
    plugin.pytest_sessionfinish(session, 1)
    record = json.loads(conftest.RECORD.read_text())
    assert (record["passed"], record["failed"], record["failures"]) == (1, 1, ["b"]) and "stale" not in record
    plugin.pytest_sessionfinish(session, 2)
    assert "2 GPU tests" in json.loads(conftest.RECORD.read_text())["stale"]
