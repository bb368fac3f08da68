"""The commands of `python -m experiments`, one file each."""
