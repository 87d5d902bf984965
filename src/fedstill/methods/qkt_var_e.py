"""QKT with var-E: each client stops each phase at the epoch that is best for it, on labelled public
data.

Source: Alballa et al., "Query-based Knowledge Transfer for Heterogeneous Learning Environments"
(QKT), appendix A.6.4: a validation set of 1 % (CINIC-10) or 10 % (other data) of the training set.
State: no global parameters; model.N = what client N fitted alone; size.N = its number of examples;
student.N = client N's model after the last phase that it went through.
Memory: nothing.
Reading: no grid is given: every epoch up to QKT's is a candidate, scored by Average Accuracy. The
set must hold the classes asked for, so it is drawn over all clients: it is ``data.public``, whose
labels this method reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fedstill.core.capabilities import Need
from fedstill.core.records import Plan
from fedstill.core.registry import method
from fedstill.methods.fit import FIT, FITTING
from fedstill.methods.naive_kd import TRANSFER
from fedstill.methods.qkt import QKT, REFINE


@method("qkt_var_e")
@dataclass(frozen=True)
class QKTVarE(QKT):
    """QKT in which a validation set tells each client when to end each phase."""

    needs: ClassVar[Need] = QKT.needs | Need.PUBLIC_DATA
    labelled: ClassVar[frozenset[str]] = frozenset({TRANSFER, REFINE})
    plans: ClassVar[Mapping[str, Plan]] = {
        FIT: FITTING,
        TRANSFER: replace(QKT.plans[TRANSFER], keep="best"),
        REFINE: replace(QKT.plans[REFINE], keep="best"),
    }
