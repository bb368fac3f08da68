"""Training on what was selected, and selecting again from such a run."""

import json
from typing import Any

import numpy as np
import pytest

import heeler
from tests.ordering.test_subset import BATCH, CHOSEN, LABELS, N, backward, set_up


def test_a_selection_its_plain_values_and_its_json_are_the_same_subset() -> None:
    chosen = heeler.select(np.random.default_rng(2).standard_normal((N, 5)), 30)
    _, model, sampler, _, loader = set_up(chosen)
    for batch in loader:
        backward(model, batch)
    assert sorted(sampler.indices.tolist()) == sorted(chosen.indices.tolist())
    weights = np.zeros(N)
    weights[chosen.indices] = chosen.weights / chosen.weights.mean()
    assert sampler.weights.numpy() == pytest.approx(weights)
    digests = {
        heeler.Sampler(N, batch_size=BATCH, subset=each).session.links.subset
        for each in (chosen, chosen.as_dict(), json.loads(json.dumps(chosen.as_dict())))
    }
    assert len(digests) == 1


def test_selecting_again_names_the_datasets_examples(tmp_path: Any) -> None:
    _, model, sampler, handle, loader = set_up()
    for batch in loader:
        backward(model, batch)
    again = heeler.select(handle, 10, "facility", labels=LABELS)
    by_rows = heeler.select(handle.table.rows, 10, "facility", labels=LABELS[sampler.subset])
    np.testing.assert_array_equal(again.indices, sampler.subset[by_rows.indices])
    assert set(again.indices) <= set(CHOSEN)
    assert again.weights.sum() == pytest.approx(30)
    heeler.save(handle, tmp_path / "state")
    for source in (tmp_path / "state", handle.state_dict(), heeler.selection.rows_of(handle)):
        np.testing.assert_array_equal(heeler.select(source, 10, "facility", labels=LABELS).indices, again.indices)
    with pytest.raises(ValueError, match=r"labels have shape \(30,\), the dataset of this subset has 67"):
        heeler.select(handle, 10, labels=LABELS[CHOSEN])
