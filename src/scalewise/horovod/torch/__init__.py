"""`horovod.torch` on torch.distributed: change the import, start with torchrun.

import scalewise.horovod.torch as hvd
"""

from scalewise.horovod import processes as _processes
from scalewise.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from scalewise.horovod.processes import *  # noqa: F403
from scalewise.horovod.torch import collectives as _collectives
from scalewise.horovod.torch import elastic
from scalewise.horovod.torch import functions as _functions
from scalewise.horovod.torch.collectives import *  # noqa: F403
from scalewise.horovod.torch.compression import Compression
from scalewise.horovod.torch.functions import *  # noqa: F403
from scalewise.horovod.torch.optimizer import DistributedOptimizer
from scalewise.horovod.torch.sync_batch_norm import SyncBatchNorm
from scalewise.horovod.wire import ReduceOp

Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "elastic",
]
__all__ += _processes.__all__
__all__ += _collectives.__all__
__all__ += _functions.__all__
