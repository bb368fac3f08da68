"""Frameworks are imported only by those who use them."""

import subprocess
import sys

import pytest

CODE = """
import sys
import heeler, heeler.integrations, heeler.streams
wrong = {"transformers", "accelerate", "lightning", "ray", "torchdata", "tensorboard"} & set(sys.modules)
wrong |= {"webdataset", "streaming", "datasets"} & set(sys.modules)
assert not wrong, wrong
import heeler.integrations.accelerate
assert "transformers" not in sys.modules and "lightning" not in sys.modules
"""
AS_IN_README = """
import sys
import heeler
assert "integrations" in dir(heeler) and {{"transformers", "accelerate", "lightning"}} <= set(dir(heeler.integrations))
assert "{framework}" not in sys.modules
assert callable(heeler.integrations.{framework}.{name})
assert "{framework}" in sys.modules
assert not hasattr(heeler.integrations, "keras")
"""


def test_no_framework_is_imported_unasked() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("framework", "name"), [("transformers", "use"), ("accelerate", "prepare"), ("lightning", "HeelerCallback")]
)
def test_importing_heeler_alone_is_enough(framework: str, name: str) -> None:
    code = AS_IN_README.format(framework=framework, name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
