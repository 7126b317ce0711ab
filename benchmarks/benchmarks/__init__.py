"""Benchmarks of cupyflash for asv; every number is better when it is lower."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tree that they lie in, installed or not
