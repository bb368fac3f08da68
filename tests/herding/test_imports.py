"""Nothing heavy is imported before it is needed."""

import subprocess
import sys

import pytest

HEAVY = {"typer", "rich", "matplotlib", "sklearn"}


def loaded_by(code: str) -> set[str]:
    code += "\nimport sys; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", ["heeler", "heeler.herding", "experiments.simulation"])
def test_imports_stay_light(module):
    assert not {"torch", *HEAVY} & loaded_by(f"import {module}")


def test_what_a_training_script_imports_is_light_beside_torch():
    assert not HEAVY & loaded_by("from heeler import Sampler, attach, explain")


def test_a_rule_needs_no_torch():
    used = """
import numpy as np
from heeler.herding import make_rule
rule = make_rule("herd", 64, 100)
rule.observe(np.arange(64), np.random.default_rng(0).standard_normal((64, 100)))
rule.next_order()
"""
    loaded = loaded_by(used)
    assert not {"torch", *HEAVY} & loaded


def test_packages_come_at_first_use():
    assert "torch" not in loaded_by("import heeler; heeler.herding.make_rule('random', 3); dir(heeler)")
