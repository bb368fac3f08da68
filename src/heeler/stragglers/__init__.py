"""Slow workers: which rank it is, and how not to wait for it.

    watch = heeler.stragglers.watch(model, optimizer)       # on every rank; then train
    print(watch.report())                                   # which rank the others wait for

`StepLimit` bounds the time of a step. `CodedRunner` goes on as soon as every batch has come in once.
"""

from heeler.stragglers.coded_runner import CodedRunner, Gathered, assign_bcc
from heeler.stragglers.slow_ranks import Report, Watch, watch
from heeler.stragglers.step_limit import StepLimit

__all__ = ["CodedRunner", "Gathered", "Report", "StepLimit", "Watch", "assign_bcc", "watch"]
