"""What cannot be selected from is refused, with advice; and where tables come from."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import heeler
from heeler.herding import SketchTable
from heeler.selection import methods, proportional_parts, rows_of

ROWS = np.random.default_rng(0).standard_normal((30, 5)).astype(np.float32)


@pytest.mark.parametrize(
    ("k", "words"),
    [
        *((k, "give 1 to 30") for k in (0, 31, -1)),
        *((k, "between 0 and 1") for k in (0.0, 1.5, float("nan"))),
        *((k, "a count or a fraction") for k in (True, "3")),
    ],
)
def test_k(k, words):
    with pytest.raises(ValueError, match=words):
        heeler.select(ROWS, k)


def test_rows():
    bad = ROWS.copy()
    bad[7, 2], bad[9, 0] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"2 of 30 rows hold NaN or infinity, examples 7, 9: .*Leave them out"):
        heeler.select(bad, 3)
    with pytest.raises(ValueError, match=r"shape \(N, K\)"):
        heeler.select(ROWS[0], 3)
    with pytest.raises(ValueError, match="convert with astype"):
        heeler.select(ROWS.astype(int), 3)
    with pytest.raises(ValueError, match="is empty"):
        heeler.select(ROWS[:0], 1)


def test_labels():
    with pytest.raises(ValueError, match="one label per example"):
        heeler.select(ROWS, 3, labels=np.zeros(29, int))
    with pytest.raises(ValueError, match=r"would leave some of the 30 classes empty .*at least 30"):
        heeler.select(ROWS, 3, labels=np.arange(30))
    with pytest.raises(ValueError, match="give every example a class"):
        heeler.select(ROWS, 3, labels=np.full(30, np.nan))
    with pytest.raises(ValueError, match="give labels="):
        heeler.select(ROWS, 3, "stratified")
    names = np.array(["a", "b", "c"] * 10)
    assert sorted(names[heeler.select(ROWS, 3, "stratified", labels=names).indices]) == ["a", "b", "c"]


def test_method():
    with pytest.raises(ValueError, match="no method 'craig': choose among random"):
        heeler.select(ROWS, 3, "craig")
    with pytest.raises(ValueError, match="all rows are zero"):
        heeler.select(np.zeros((9, 2)), 3, "match")


def test_parts():
    assert proportional_parts(10, [50, 30, 20]).tolist() == [5, 3, 2]
    assert proportional_parts(4, [97, 1, 1, 1]).tolist() == [1, 1, 1, 1]
    assert proportional_parts(9, [2, 2, 5]).tolist() == [2, 2, 5]
    numbers = np.random.default_rng(0)
    for _ in range(200):
        sizes = numbers.integers(1, 60, numbers.integers(1, 12))
        k = int(numbers.integers(sizes.size, sizes.sum() + 1))
        parts = proportional_parts(k, sizes)
        assert parts.sum() == k
        assert (parts >= 1).all()
        assert (parts <= sizes).all()
        exact = k * sizes / sizes.sum()
        assert (np.abs(parts - np.maximum(exact, 1)) < sizes.size + 1).all()
    with pytest.raises(ValueError, match="part 1 is empty"):
        proportional_parts(3, [4, 0])
    with pytest.raises(ValueError, match="at least one of each"):
        proportional_parts(1, [4, 4])


def test_memory_mapped_and_torch(tmp_path):
    import torch

    np.save(tmp_path / "rows.npy", ROWS)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    whole = heeler.select(ROWS, 8)
    for source in (mapped, torch.from_numpy(ROWS)):
        assert np.array_equal(heeler.select(source, 8).indices, whole.indices)


def test_a_table_in_half_precision_chooses_as_its_rows_do():
    table = SketchTable(30, 5)
    table.put(np.arange(30), ROWS * 1e-5)
    assert table.scale != 1
    first, second = (heeler.select(source, 8, "facility") for source in (table, ROWS))
    assert first.indices.tolist() == second.indices.tolist()
    assert first.error == pytest.approx(second.error, rel=1e-2)


def test_unseen_examples_are_refused():
    table = SketchTable(30, 5)
    table.put(np.arange(28), ROWS[:28])
    with pytest.raises(ValueError, match="2 of 30 examples have no sketch yet, examples 28, 29: train until"):
        heeler.select(table, 8)


def trained(order="herd", size=30, batch=8):
    """A handle after an epoch with a short last batch, and each example's own gradient."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    x, y = torch.randn(size, 4), torch.randint(0, 3, (size,))
    model = nn.Linear(4, 3)
    sampler = heeler.Sampler(size, batch_size=batch, order=order)
    handle = heeler.attach(model, sampler)
    for rows in torch.utils.data.BatchSampler(sampler, batch, drop_last=False):
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        model.zero_grad()
    own = []
    for i in range(size):
        with handle.paused():
            grads = torch.autograd.grad(
                nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), model.parameters()
            )
        own.append(torch.cat([g.flatten() for g in grads]).numpy())
    return handle, np.array(own)


def test_a_handle_and_its_saved_state(tmp_path):
    handle, own = trained()
    chosen = heeler.select(handle, 10, "facility")
    heeler.save(handle, tmp_path / "state")
    for source in (tmp_path / "state", str(tmp_path / "state"), handle.state_dict(), handle.table):
        assert np.array_equal(heeler.select(source, 10, "facility").indices, chosen.indices)
    # A short last batch (6 of 8) counts the same: every row is as long as its example's own gradient.
    lengths = np.sqrt(rows_of(handle).squares) / handle.table.scale
    assert lengths == pytest.approx(np.linalg.norm(own, axis=1), rel=2e-3)


def test_a_handles_table_is_held_while_it_is_read(monkeypatch):
    handle, _ = trained()
    lock, drain, held = threading.Lock(), handle.session.drain, []

    def checked(**how):
        assert not lock.locked()  # the planner would wait for ever
        return drain(**how)

    monkeypatch.setattr(handle.session, "drain", checked)
    monkeypatch.setattr(handle.session.planner, "reading", lambda: lock)

    def spy(rows, rng):
        held.append(lock.locked())
        return methods.random(rows, rng)

    monkeypatch.setitem(methods.METHODS, "spy", spy)
    heeler.select(handle, 3, "spy")
    assert held == [True]
    assert not lock.locked()


def test_a_worker_that_does_not_see_all_is_refused(monkeypatch):
    handle, _ = trained()
    monkeypatch.setattr(type(handle.session.planner), "sees_all", False)
    with pytest.raises(ValueError, match="select on rank 0"):
        heeler.select(handle, 3)


def test_an_order_without_a_table_is_refused(tmp_path):
    handle, _ = trained("random")
    with pytest.raises(ValueError, match="order='herd'"):
        heeler.select(handle, 3)
    with pytest.raises(ValueError, match="holds no table"):
        heeler.select(handle.state_dict(), 3)


def test_nothing_global_changes_on_import_and_use():
    code = """
import random, sys, warnings
import numpy as np
before = (np.geterr(), np.get_printoptions(), random.getstate(), np.random.get_state()[1].tolist(), warnings.filters[:])
import heeler
rows = np.random.default_rng(0).standard_normal((40, 3))
for method in heeler.selection.METHODS:
    heeler.select(rows, 8, method, labels=np.arange(40) % 2)
after = (np.geterr(), np.get_printoptions(), random.getstate(), np.random.get_state()[1].tolist())
assert before[:4] == after, "changed"
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_is_light():
    code = "import sys, heeler.selection; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_core_does_not_know_of_it():
    source = Path(heeler.__file__).parent
    files = [path for name in ("herding", "ordering", "sketch") for path in (source / name).rglob("*.py")]
    assert len(files) > 20
    assert not [str(path) for path in files if re.search(r"import.*selection|from heeler.selection", path.read_text())]


def test_its_words():
    chosen = heeler.select(ROWS, 8, "random")
    assert str(chosen).startswith("random: 8 examples, weights 3.75 to 3.75; error ")
    plain = json.loads(json.dumps(chosen.as_dict()))
    assert plain["indices"] == chosen.indices.tolist()
    assert plain["random_mmd"] == {"mean": chosen.random_mmd.mean, "sd": chosen.random_mmd.sd}
