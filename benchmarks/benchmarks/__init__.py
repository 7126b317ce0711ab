"""Benchmarks of cupyflash for asv; every number is better when it is lower."""
