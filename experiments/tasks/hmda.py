"""U.S. mortgage applications of 2017 (HMDA), New Jersey: was the loan granted? Logistic regression, 19 parameters."""

from __future__ import annotations

import csv
import hashlib
import io
import zipfile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.folder import Folder, MissingData, Source
from experiments.tasks.base import Examples
from experiments.tasks.linear import LinearTask

FILE = "hmda-nj-2017/applications.npz"
LEAKS = "purchaser_type"
"""Known only once a loan exists, so it gives the label away."""
COLUMNS = (
    *("agency_code", "loan_type", "property_type", "loan_purpose", "owner_occupancy", "loan_amount_000s"),
    *("preapproval", "msamd", "county_code", "census_tract_number", "applicant_income_000s", LEAKS, "population"),
    *("minority_population", "hud_median_family_income", "tract_to_msamd_income", "number_of_owner_occupied_units"),
    *("number_of_1_to_4_family_units", "has_co_applicant"),
)
TABLES = (
    "https://raw.githubusercontent.com/pasta41/hmda-data-2017/705d6571e8487b6d7b3d438397ce727e028783d5/2017/NJ/"
    "2017-NJ-{}.zip"
)
"""One table of comma-separated values each: features, and the target `action_taken`."""
SHA256 = "164932b11fe555d155e4c057e0e1250b7acd50b1be9ad11114c339c5b7bb5fc1"
"""Of X and y, their bytes one after the other."""
GRANTED, DENIED = 1, 3


def read_applications(folder: Folder) -> tuple[NDArray[np.float32], NDArray[np.uint8], list[str]]:
    """(N, 19) features, unscaled, (N,) whether the loan was granted, and the columns' names."""
    packed = folder.find(FILE)
    if packed is not None:
        arrays = np.load(io.BytesIO(packed.read_bytes()))
        return arrays["X"], arrays["y"], [str(name) for name in arrays["columns"]]
    features, target = (
        read_table(folder.read(f"hmda-nj-2017/2017-NJ-{part}.zip", Source(TABLES.format(part))))
        for part in ("features", "target")
    )
    x, y = granted_or_denied(features, target, folder)
    digest = hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()
    if digest != SHA256:
        raise MissingData(
            f"{TABLES.format('features')} and its target give applications of sha256 {digest}, not {SHA256}: a "
            f"download is damaged or was made otherwise. {_how(folder)}"
        )
    raw = io.BytesIO()
    np.savez_compressed(raw, X=x, y=y, columns=np.array(COLUMNS))
    folder.keep(FILE, raw.getvalue())
    return x, y, list(COLUMNS)


def read_table(archive: bytes) -> dict[str, list[str]]:
    """Name → column of the one table in a zip archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        name = next(name for name in files.namelist() if name.endswith(".csv"))
        head, *rows = csv.reader(io.StringIO(files.read(name).decode("utf-8")))
    return dict(zip(head, map(list, zip(*rows, strict=True)), strict=True))


def granted_or_denied(
    features: dict[str, list[str]], target: dict[str, list[str]], folder: Folder
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The applications that were decided upon, in the files' order."""
    missing = [name for name in COLUMNS if name not in features] + ["action_taken"] * ("action_taken" not in target)
    if missing:
        raise MissingData(f"{TABLES.format('features')} lacks the columns {', '.join(missing)}. {_how(folder)}")
    taken = np.array(target["action_taken"], np.float64)
    x = np.stack([np.array(features[name], np.float32) for name in COLUMNS], axis=1)
    decided = (taken == GRANTED) | (taken == DENIED)
    return np.ascontiguousarray(x[decided]), (taken[decided] == GRANTED).astype(np.uint8)


def _how(folder: Folder) -> str:
    return (
        f"Put {folder.path / FILE} there: arrays X (N×19 float32, unscaled), y (1 = loan originated) and columns "
        f"({', '.join(COLUMNS)}), of New Jersey's applications of 2017 whose action_taken is 1 or 3; or name the "
        "folder that has it with --data or HEELER_DATA."
    )


class Hmda(LinearTask):
    """As published, but for the state (New Jersey in place of New York) and the column that leaks the label."""

    name = "hmda"
    summary = "HMDA NJ 2017, logistic regression (convex)"
    defaults = {  # noqa: RUF012
        "epochs": 50,
        "batch_size": 16,
        "lr": 5e-3,
        "momentum": 0.9,
        "workers": 4,
        "shards": "local",
    }

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        table, label, columns = read_applications(folder)
        kept = [i for i, column in enumerate(columns) if column != LEAKS]
        features = table[:, kept].astype(np.float64)
        mixed = np.random.default_rng(0).permutation(len(label))[: options.get("limit")]
        features, label = features[mixed], label[mixed]
        train = len(label) * 9 // 10
        spread = features[:train].std(axis=0)
        features = (features - features[:train].mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        x = torch.tensor(features, dtype=torch.float32)
        y = torch.tensor(label, dtype=torch.int64)
        return Examples((x[:train], y[:train]), (x[train:], y[train:]))
