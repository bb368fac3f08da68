"""CONTRIBUTING's walk is true: README's own script calls every stop, in the table's order, and only goes forward."""

import contextlib
import functools
import importlib
import inspect
import io
import itertools
import re
import sys
import threading
from pathlib import Path
from types import CodeType

import pytest
import torch

import heeler
from heeler.herding.rules.herd import Herd
from heeler.ordering.loader_probe import LoaderProbe
from heeler.ordering.session import Session
from heeler.sketch.eager_passes import EagerPasses
from heeler.sketch.layer_rules.linear import LinearRule
from tests.docs.blocks import ROOT, fenced
from tests.docs.test_names import CONTRIBUTING, STOPS, WALK, section

HOME = str(Path(heeler.__file__).parent)
SMALLER = {"2000": "128", "range(10)": "range(3)", '("random", "herd")': '("herd",)'}
"""README's script needs no more than this to go every way: 8 steps per epoch, the last epoch without sketches."""
STEPS = 8


def code_of(file: str, name: str) -> CodeType:
    module = importlib.import_module("heeler." + file.removesuffix(".py").replace("/", "."))
    return inspect.unwrap(functools.reduce(getattr, name.split("."), module)).__code__


@pytest.fixture(scope="module")
def stops() -> list[CodeType]:
    return [code_of(file.strip("`"), name.strip("`")) for _, file, name in STOPS]


@pytest.fixture(scope="module")
def calls(traced) -> list[CodeType]:
    return traced[0]


@pytest.fixture(scope="module")
def own_calls(traced) -> list[CodeType]:
    return traced[1]


@pytest.fixture(scope="module")
def traced() -> tuple[list[CodeType], list[CodeType]]:
    """Functions of Heeler that README's script calls, in order: with those in the thread of a solve, and without."""
    script = next(block.code for block in fenced(ROOT / "README.md") if '("random", "herd")' in block.code)
    for large, small in SMALLER.items():
        assert large in script
        script = script.replace(large, small)
    called: list[CodeType] = []
    own: list[CodeType] = []
    main = threading.get_ident()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            called.append(frame.f_code)
            if threading.get_ident() == main:
                own.append(frame.f_code)

    threads, before = torch.get_num_threads(), sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(script, "first.py", "exec"), {"__name__": "first"})
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        torch.set_num_threads(threads)
    return called, own


def places(calls, function) -> list[int]:
    return [place for place, code in enumerate(calls) if code is function.__code__]


def in_order_of_first_call(calls, wanted) -> list[CodeType]:
    return list(dict.fromkeys(code for code in calls if code in wanted))


def batches(calls) -> list[int]:
    """Where the loop gets each of its batches: the steps begin there."""
    found = places(calls, LoaderProbe.hand_out)
    assert len(found) == 3 * STEPS
    return found


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("step", [0, STEPS // 2, STEPS - 1])
def test_one_gradient_passes_every_stop_in_the_order_of_the_table(calls, stops, epoch, step):
    """From its forward to the order that follows its epoch."""
    order = places(calls, Herd.commit)[epoch]
    forward = calls.index(EagerPasses.begin.__code__, batches(calls)[epoch * STEPS + step])
    begin = calls.index(stops[0], forward)  # after the passes before this one were stored
    assert in_order_of_first_call(calls[begin : order + 1], stops) == stops


def test_the_next_index_comes_after_the_last_stop(calls):
    """As the sentence below the table says."""
    below = re.search(r"^Then (.+)", section(CONTRIBUTING, WALK), re.MULTILINE)[1]
    made, drawn = re.findall(r"`(\w+\.\w+)`", below)
    ends = [code_of("ordering/session.py", made), code_of("ordering/progress.py", drawn)]
    after = calls[places(calls, Herd.commit)[0] :]
    assert in_order_of_first_call(after, [*ends, LoaderProbe.hand_out.__code__])[:2] == ends


def test_nothing_is_solved_while_an_epoch_without_sketches_goes_on(calls):
    """Epoch 3 takes none."""
    third = calls[batches(calls)[2 * STEPS] :]
    assert code_of("herding/rules/herd.py", "Herd.solve") not in third
    assert code_of("sketch/recorder.py", "Recorder.file") not in third


def test_a_stop_that_is_not_called_is_found(calls, stops):
    """Version 0.2's table had `LinearRule.sketch`, which small models do not need."""
    wrong = [*stops[:3], LinearRule.sketch.__code__, *stops[3:]]
    assert in_order_of_first_call(calls, wrong) != wrong


def test_the_walk_is_short_and_goes_one_way():
    files = [file.strip("`") for _, file, _ in STOPS]
    assert len(STOPS) <= 12
    assert len(set(files)) <= 10
    assert [package for package, _ in itertools.groupby(files, lambda f: f.split("/")[0])] == [
        "sketch",
        "ordering",
        "herding",
    ]
    assert [number for number, _, _ in STOPS] == [str(n + 1) for n in range(len(STOPS))]


def test_a_step_is_short(own_calls):
    """From one batch to the next, in the middle of a sketched epoch and of one without sketches."""
    calls, handed_out = own_calls, batches(own_calls)
    for epoch, most_calls, most_files in ((1, 143, 26), (2, 34, 14)):  # a little more than it takes, 139 and 32
        middle = epoch * STEPS + STEPS // 2
        step = calls[handed_out[middle] : handed_out[middle + 1]]
        # Optimizers' hooks of samplers that other tests have left behind are none of its business.
        step = [code for code in step if not code.co_filename.endswith("loss_scaler.py")]
        assert (Session.drain.__code__ in step) == (epoch == 1)
        assert len(step) <= most_calls
        assert len({code.co_filename for code in step}) <= most_files
