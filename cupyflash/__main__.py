"""Command line: ``python -m cupyflash`` does the main job, ``... compile`` compiles, ``... roofline`` predicts."""

from __future__ import annotations

import argparse
import re
import sys

from cupyflash import __version__, roofline_report

DESCRIPTION = """\
Run a real transformer (MiniLM) on real text with its attention computed by cupyflash, compare it with the
float64 reference and with standard attention, measure time and memory, and print a table. Without the
pretrained model (extra "demo") the same is done with random weights. The exit code is 0 if
every check holds, 1 if one fails, 2 if the run is not possible."""
COMPILE_DESCRIPTION = """\
Compile the kernels of head_dim 64, 96, 128, 192 and 256 in both dtypes, without softcap, ALiBi and dropout,
and print their registers, spills, shared memory and time. Other kernels are built on their first call. On a
machine with a GPU, and without --arch, this also fills the cache on disk. The exit code is 1 if a kernel
spills, does not compile or, on Hopper, has its matrix products put in a row by the compiler."""

ROOFLINE_DESCRIPTION = """\
Print what attention of one size costs on a GPU and what it waits for there: operations, exponentials and
bytes of standard attention and of each kernel path, the time that tensor cores, memory, special-function
units and shared memory need for them, and which is longest. By formula, without a GPU; with --measure against
the ceilings and the times of the GPU here. The exit code is 2 if that is not possible."""


def main(arguments=None):
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser("python -m cupyflash", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--backend", choices=("numpy", "cuda"), help="default: cuda if a GPU can be used")
    as_json = "print JSON instead of a table"
    parser.add_argument("--json", action="store_true", help=as_json)
    commands = parser.add_subparsers(dest="command", title="commands", metavar="")
    compiling = commands.add_parser(
        "compile", help="compile kernels ahead; needs no GPU", description=COMPILE_DESCRIPTION
    )
    compiling.add_argument(
        "--arch",
        type=architectures,
        default=[],
        metavar="LIST",
        help="like sm_80,sm_90a; default: that of the GPU here, else sm_80,sm_90",
    )
    # Suppressed, since a default would undo a --json that stands before the command.
    compiling.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=as_json)
    predicting = commands.add_parser(
        "roofline", help="predict what a call waits for; needs no GPU", description=ROOFLINE_DESCRIPTION
    )
    roofline_report.add_arguments(predicting)
    predicting.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=as_json)
    options = parser.parse_args(arguments)

    if options.command and options.backend:
        parser.error(f"--backend is an option of the main job, not of {options.command}")
    if options.command == "roofline":
        roofline_report.check_plot(predicting, options)
        return roofline_report.command(options)
    if options.command == "compile":
        from cupyflash import compiler

        return compiler.compile_command(options.arch, options.json)

    from cupyflash.demo import job, machine, table

    try:
        report = job.run(options.backend)
    except machine.NoGpu as error:
        print(f"--backend cuda: {error}", file=sys.stderr)
        return 2
    print(roofline_report.as_json(report, indent=2) if options.json else table.table(report))
    return 0 if report["passed"] else 1


def architectures(text):
    names = [name.strip() for name in text.split(",")]
    if not all(re.fullmatch(r"sm_\d+[af]?", name) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like sm_80,sm_90a")
    return names


if __name__ == "__main__":
    sys.exit(main())
