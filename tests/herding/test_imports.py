"""Nothing heavy is imported before it is needed."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["heeler", "heeler.herding", "experiments.simulation", "benchmarks.solver"])
def test_imports_stay_light(module):
    code = f"import sys, {module}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numba", "llvmlite", "typer", "rich", "matplotlib", "sklearn"} & set(loaded)
