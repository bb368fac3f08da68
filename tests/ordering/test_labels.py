"""Labels are found where datasets name them, and nowhere else."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from heeler.ordering.labels import find_labels

CLASSES = (np.arange(60) * 7) % 5


class Named:
    """A dataset with attributes of its own."""

    def __init__(self, length: int = 60, **attributes: Any) -> None:
        self.length = length
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("an example was decoded")


class Columns(Named):
    """As `datasets.Dataset` behaves where we touch it: an image column that must not be read, and a transform."""

    def __init__(self, columns: dict[str, Any], alone: bool = False) -> None:
        super().__init__(len(next(iter(columns.values()))))
        self.columns, self.alone, self.features = columns, alone, dict.fromkeys(columns)

    def select_columns(self, names: list[str]) -> "Columns":
        return Columns({name: self.columns[name] for name in names}, alone=True)

    def with_format(self, kind: str) -> "Columns":
        assert kind == "numpy"
        return self

    def __getitem__(self, index: Any) -> Any:
        assert self.alone, "all columns would be decoded"
        assert index == slice(None)
        return {name: np.asarray(column) for name, column in self.columns.items()}


@pytest.mark.parametrize(
    ("dataset", "where"),
    [
        (Named(targets=CLASSES.tolist()), "dataset.targets"),
        (Named(targets=torch.from_numpy(CLASSES)), "dataset.targets"),
        (Named(labels=CLASSES.astype(np.uint8)), "dataset.labels"),
        (Named(targets=[{"boxes": 1}] * 60, labels=CLASSES), "dataset.labels"),
        (Columns({"image": [None] * 60, "label": CLASSES}), "the column 'label'"),
        (Columns({"text": ["x"] * 60, "labels": CLASSES}), "the column 'labels'"),
    ],
)
def test_labels_are_found(dataset: Any, where: str) -> None:
    found = find_labels(dataset)
    assert found is not None
    np.testing.assert_array_equal(found[0], CLASSES)
    assert found[0].dtype == np.int64
    assert found[1] == where
    half = Subset(dataset, list(range(59, 9, -1)))
    found = find_labels(Subset(half, torch.arange(50)))
    assert found is not None
    np.testing.assert_array_equal(found[0], CLASSES[59:9:-1])
    assert found[1].startswith(where)
    assert "Subset" in found[1]


class Broken(Named):
    @property
    def targets(self) -> Any:
        raise RuntimeError("not downloaded")


@pytest.mark.parametrize(
    "dataset",
    [
        Named(),
        Named(targets=None),
        Named(targets=CLASSES.astype(float)),
        Named(targets=["cat", "dog"] * 30),
        Named(targets=np.eye(60, dtype=int)),
        Named(targets=np.arange(60)),
        Named(targets=np.arange(60) % 7),  # fewer than ten of each
        Named(targets=np.zeros(60, int)),
        Named(targets=CLASSES[:59]),
        Named(30_000, targets=np.arange(30_000) % 1001),
        Named(targets=dict.fromkeys(range(60), 0)),
        Named(label=CLASSES),
        Columns({"image": [None] * 60, "target": CLASSES}),
        Columns({"labels": [[1, 2]] * 60}),
        Columns({"label": [0.5] * 60}),
        Broken(),
        TensorDataset(torch.zeros(60, 2), torch.from_numpy(CLASSES)),
        ConcatDataset([Named(targets=CLASSES), Named(targets=CLASSES)]),
        60,
        None,
    ],
)
def test_what_may_be_no_classes_is_left_alone(dataset: Any) -> None:
    assert find_labels(dataset) is None


def test_hugging_faces_own_datasets() -> None:
    datasets = pytest.importorskip("datasets")
    images = datasets.Dataset.from_dict(
        {"text": ["x"] * 60, "label": CLASSES.tolist()},
        features=datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(num_classes=5)}),
    )

    def fails(batch: Any) -> Any:
        raise AssertionError("an example was decoded")

    for dataset, labels in (
        (images, CLASSES),
        (images.with_transform(fails), CLASSES),
        (images.with_format("torch"), CLASSES),
        (images.select(range(50)), CLASSES[:50]),
        (Subset(images.shuffle(seed=0), range(60)), np.array(images.shuffle(seed=0)["label"][:])),
    ):
        found = find_labels(dataset)
        assert found is not None
        np.testing.assert_array_equal(found[0], labels)
        assert "the column 'label'" in found[1]
    assert find_labels(images.rename_column("label", "class")) is None
