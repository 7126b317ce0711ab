"""Compare two commits on this machine with asv: fails where the second is slower, or needs more, by over 3 %.

    python benchmarks/compare.py OLD NEW [--bench bench_forward] [--rounds 2] [--factor 1.03]

asv's own ``continuous`` builds an environment for each commit, which needs a network and gigabytes for CuPy and CUDA.
Here both commits are checked out side by side and run in the present environment, one after the other and again, so
that a drift of the clock hits both; asv keeps all samples and compares them. The benchmarks are those of this tree for
both, and the results stay apart from the committed ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from output import git, lacks

from cupyflash.roofline_report import as_json, count, rate

HERE = Path(__file__).resolve().parent
WORSE = ("+", "!")  # asv's marks: slower; fails now
COLUMNS = ("change", "before", "after", "ratio", "benchmark")


def asv(config, *arguments, capture=False):
    """Run asv with the configuration ``config``."""
    return subprocess.run(
        [sys.executable, "-m", "asv", *arguments, "--config", str(config)],
        cwd=HERE,
        stdout=subprocess.PIPE if capture else sys.stderr,
        text=True,
    )


def configure(folder, tree):
    """A configuration for cupyflash in ``tree``, with the benchmarks of this tree; results go into ``folder``."""
    suites = tree / "benchmarks" / "benchmarks"  # they import what they lie beside
    shutil.rmtree(suites, ignore_errors=True)
    shutil.copytree(HERE / "benchmarks", suites, ignore=shutil.ignore_patterns("__pycache__"))
    settings = json.loads((HERE / "asv.conf.json").read_text())
    settings |= {"repo": str(HERE.parent), "benchmark_dir": str(suites)}
    settings |= {name: str(folder / name) for name in ("results_dir", "env_dir", "html_dir")}
    config = folder / f"{tree.name}.json"
    config.write_text(json.dumps(settings))
    return config


def benchmarks():
    """Names of the benchmarks with each choice of their parameters, which is what asv searches for a REGEX."""
    from asv_runner.discovery import disc_benchmarks, update_sys_path

    update_sys_path(str(HERE / "benchmarks"))
    for one in disc_benchmarks(str(HERE / "benchmarks")):
        for choice in itertools.product(*one.params):
            yield one.name + (f"({', '.join(choice)})" if choice else "")


def check_bench(patterns):
    """Raise where one of ``patterns`` finds no benchmark."""
    names = list(benchmarks()) if patterns else []
    for pattern in patterns:
        try:
            found = any(re.search(pattern, name) for name in names)
        except re.error as error:
            raise RuntimeError(f"--bench {pattern!r} is no regular expression: {error}") from None
        if not found:
            known = ", ".join(dict.fromkeys(name.split("(")[0] for name in names))
            raise RuntimeError(f"--bench {pattern!r} finds no benchmark among {known}")


def compared(table):
    """The head of asv's table, and cells and line of what ran on the first commit and was not skipped on the second."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    rows = [(dict(zip(COLUMNS, map(str.strip, line.strip("|").split("|")))), line) for line in lines[2:]]
    ran = [(row, line) for row, line in rows if row["before"] not in ("n/a", "failed") and row["after"] != "n/a"]
    return lines[:2], ran


def compare(old, new, options, folder):
    """Measure both commits; return asv's table."""
    configs = {}
    try:
        for commit in (old, new):
            git("worktree", "add", "--detach", "--quiet", str(folder / commit), commit)
            configs[commit] = configure(folder, folder / commit)
        asv(configs[old], "machine", "--yes")
        for number in range(options.rounds):
            for commit, config in configs.items():
                print(f"round {number + 1} of {options.rounds}, {commit[:8]}", file=sys.stderr, flush=True)
                chosen = [argument for bench in options.bench for argument in ("--bench", bench)]
                run = ("run", "--python=same", "--set-commit-hash", commit, "--append-samples", *chosen)
                done = asv(config, *run)
                if done.returncode not in (0, 2):  # 2: a benchmark failed, which the comparison tells
                    raise RuntimeError(f"asv failed with exit code {done.returncode}")
    finally:
        for commit in (old, new):
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(folder / commit)], cwd=HERE, capture_output=True
            )
    factor = str(options.factor)
    done = asv(configs[new], "compare", "--factor", factor, "--sort", "ratio", old, new, capture=True)
    if done.returncode:
        raise RuntimeError(f"asv compare failed with exit code {done.returncode}")
    return done.stdout


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", help="a commit, branch or tag")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--bench", action="append", default=[], metavar="REGEX", help="only these; may be repeated")
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--factor", type=rate, default=1.03)
    parser.add_argument("--json", action="store_true", help="print all that was compared as JSON")
    options = parser.parse_args(arguments)
    try:
        import asv as _  # noqa: F401
    except ImportError:
        lacks('asv is missing; it comes with the extra "bench"')
    try:
        check_bench(options.bench)
        old, new = (git("rev-parse", "--verify", f"{name}^{{commit}}") for name in (options.old, options.new))
        if old == new:
            raise RuntimeError(f"{options.old} and {options.new} are the same commit, {old[:8]}")
        with tempfile.TemporaryDirectory() as folder:
            table = compare(old, new, options, Path(folder))
        head, rows = compared(table)
        if not rows:
            raise RuntimeError("nothing ran on both commits; without a GPU: --bench Numpy --bench Build")
    except subprocess.CalledProcessError as error:
        lacks(f"{' '.join(error.cmd)}: {error.stderr.strip()}")
    except RuntimeError as error:
        lacks(error)
    worse = sum(row["change"] in WORSE for row, _ in rows)
    if options.json:
        found = {"old": old, "new": new, "factor": options.factor, "worse": worse}
        print(as_json(found | {"rows": [row for row, _ in rows]}))
    else:
        changed = [line for row, line in rows if row["change"]]
        print("\n".join([*head, *changed] if changed else ["nothing changed"]))
        print(f"worse by over {100 * (options.factor - 1):.3g}% from {old[:8]} to {new[:8]}: {worse} of {len(rows)}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
