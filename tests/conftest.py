"""Tests that take minutes are left out; `pytest -m slow` runs them and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CPUINFO = Path("/proc/cpuinfo")
if CPUINFO.exists() and "amx_tile" in CPUINFO.read_text():
    # Some virtual machines announce AMX and do not allow it: PyTorch's own bfloat16 layers then raise "could not create
    # a primitive". The variable is read as PyTorch is imported.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; runs with -m slow alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
