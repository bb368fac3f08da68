"""The commands of `python -m benchmarks`, one file each."""
