"""Frameworks are imported only by those who use them."""

import subprocess
import sys

CODE = """
import sys
import heeler, heeler.integrations, heeler.streams
wrong = {"transformers", "accelerate", "lightning", "ray", "torchdata", "tensorboard"} & set(sys.modules)
wrong |= {"webdataset", "streaming", "datasets"} & set(sys.modules)
assert not wrong, wrong
import heeler.integrations.accelerate
assert "transformers" not in sys.modules and "lightning" not in sys.modules
"""


def test_no_framework_is_imported_unasked() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
