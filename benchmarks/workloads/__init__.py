"""What is timed: a file per kind of model."""

from benchmarks.workloads import bert, fast_resnet, mlp, vit
from benchmarks.workloads._workload import Workload

WORKLOADS: dict[str, Workload] = {
    **mlp.WORKLOADS,
    **fast_resnet.WORKLOADS,
    **bert.WORKLOADS,
    **vit.WORKLOADS,
}

__all__ = ["WORKLOADS", "Workload"]
