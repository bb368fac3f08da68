"""The published rules' loops run where numba can keep no compiled code, as in a read-only container without a home."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import heeler
from heeler.herding import make_rule

VECTORS = np.random.default_rng(0).standard_normal((64, 100)).astype(np.float32)
RUN = """
import numpy as np, sys
import heeler
from heeler.herding import jit, make_rule

assert heeler.__file__.startswith(sys.argv[1]), heeler.__file__
vectors = np.random.default_rng(0).standard_normal((64, 100)).astype(np.float32)
rule = make_rule("pair", 64, 100)
rule.observe(np.arange(64), vectors)
print(*rule.next_order())
print(jit._COMPILE["cache"])
"""


@pytest.mark.parametrize("writable", [True, False])
def test_kernels_compile_without_a_cache(tmp_path: Path, writable: bool) -> None:
    """Folders cannot be made inside a file, which binds root too, as permissions do not."""
    source = Path(heeler.__file__).parent
    shutil.copytree(source, tmp_path / "heeler", ignore=shutil.ignore_patterns("__pycache__"))
    if not writable:
        (tmp_path / "heeler" / "herding" / "__pycache__").touch()
    hidden = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "IPYTHONDIR")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    env = {**clean, "HOME": "/dev/null", "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    order, cached = done.stdout.splitlines()
    assert cached == str(writable)
    rule = make_rule("pair", 64, 100)
    rule.observe(np.arange(64), VECTORS)
    assert order.split() == [str(i) for i in rule.next_order()]
    assert any(tmp_path.rglob("*.nbi")) == writable
