"""Workers that lag: who they are, and how not to wait for them.

    watch = heeler.stragglers.watch(model, optimizer)       # on every rank; then train
    print(watch.report())                                   # which rank the others wait for

`report`: that; `limit`: a step of bounded time; `assign`: codes with which a gradient is whole before every worker has
answered; `simulate`: how many workers these wait for; `coded`: a runner with such a code.
"""

from heeler.stragglers.assign import assign_bcc, assign_fractional, code_of, cyclic_code, decode
from heeler.stragglers.coded import CodedRunner, Gathered
from heeler.stragglers.limit import StepLimit
from heeler.stragglers.report import Report, Watch, watch
from heeler.stragglers.simulate import Simulation, coupons, delays, recovery_threshold, simulate

__all__ = [
    "CodedRunner",
    "Gathered",
    "Report",
    "Simulation",
    "StepLimit",
    "Watch",
    "assign_bcc",
    "assign_fractional",
    "code_of",
    "coupons",
    "cyclic_code",
    "decode",
    "delays",
    "recovery_threshold",
    "simulate",
    "watch",
]
