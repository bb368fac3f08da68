"""Many trainings on subsets: their order, what is kept of a plan that was cut short, and that nothing is done twice."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import subset_jobs
from experiments.subset_jobs import ALL, TABLE, Agenda, Place, carry_out, collected, entry_jobs, in_turn, read_plan
from experiments.subsets_run import main

ENTRY = {"task": "digits", "steps": 3, "warm_up": 1, "seeds": 2, "methods": ["random", "halve"], "fractions": [0.1]}


def test_all_tasks_have_a_seed_before_the_next_begins():
    jobs = in_turn([entry_jobs(ENTRY), entry_jobs({**ENTRY, "task": "digits-mlp", "fractions": [0.1, 0.3]})])
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    assert [job.method for job in jobs[:4]] == [TABLE, TABLE, ALL, ALL]
    assert len({job.key for job in jobs}) == len(jobs) == 2 * (4 + 6)


def test_a_job_waits_for_its_table_and_then_takes_its_place():
    jobs = entry_jobs(ENTRY)
    agenda = Agenda(jobs, set())
    assert [(job.seed, job.method) for job in agenda.waiting] == [(0, TABLE), (0, ALL), (1, TABLE), (1, ALL)]
    agenda.waiting.popleft()
    agenda.done(jobs[0].key)
    assert [(job.seed, job.method) for job in agenda.waiting][:3] == [(0, ALL), (0, "random"), (0, "halve")]
    assert agenda.waiting[3].seed == 1
    done = {job.key for job in jobs if job.seed == 0 and job.method != TABLE}
    assert all(job.seed == 1 for job in Agenda(jobs, done).waiting)  # nobody needs seed 0's table


def test_what_is_done_is_not_repeated_and_a_broken_line_is(tmp_path, monkeypatch):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([ENTRY]))
    words = ["--plan", str(plan), "--out", str(tmp_path / "found.jsonl"), "--tables", str(tmp_path / "tables")]
    assert main(words) == 0
    whole = (tmp_path / "found.jsonl").read_text()
    assert whole.count("\n") == 8  # 2 seeds × (setting, all, two methods)
    (tmp_path / "found.jsonl").write_text(whole[:-20])
    begun = []
    monkeypatch.setattr(Place, "_done", lambda self, job, done=Place._done: begun.append(job.method) or done(self, job))
    assert main(words) == 0
    assert begun == ["halve"]
    assert main([*words, "--pack", str(tmp_path)]) == 0
    packed = json.loads((tmp_path / "subsets-digits.json").read_text())
    assert [(r["seed"], r["method"]) for r in packed["records"]] == [
        (seed, method) for seed in (0, 1) for method in (ALL, "random", "halve")
    ]
    assert packed["setting"]["seeds"] == 2
    assert packed["setting"]["settings"]["task"] == "digits"


def test_a_failure_costs_only_its_own(tmp_path, monkeypatch):
    def fails(setting, folder, seed):
        if seed == 0:
            raise RuntimeError("no table today")
        return np.zeros((2, 2), np.float32)

    monkeypatch.setattr(subset_jobs, "left_behind", fails)
    monkeypatch.setattr(subset_jobs, "measured", lambda *a: {"method": a[3], "fraction": a[4], "seed": a[5]})
    said: list[str] = []
    jobs, place = entry_jobs(ENTRY), Place(None, tmp_path / "tables", tmp_path / "found.jsonl")
    assert carry_out(jobs, place, processes=1, minutes=None, say=said.append) == 2
    assert sum("no table today" in line for line in said) == 1
    assert sum("FAILED" in line for line in said) == 3  # the table, and the two that had none
    assert [r["seed"] for r in collected(jobs, place)["digits"]["records"]] == [0, 1, 1, 1]


@pytest.mark.parametrize("path", sorted(Path(subset_jobs.__file__).parent.glob("plan_files/subsets/*.json")))
def test_plans_can_be_read(path):
    assert len(read_plan(path)) > 4


@pytest.mark.parametrize(("entry", "message"), [({"task": "digits", "epocs": 3}, "no such setting"), ({}, "task")])
def test_a_mistake_is_told(tmp_path, entry, message):
    (tmp_path / "plan.json").write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match=rf"entry 0.*{message}"):
        read_plan(tmp_path / "plan.json")
