"""Training that continues after processes were lost, carried by torchrun's agent.

When a process dies, or machines come and go, torchrun (`--max-restarts`, `--nnodes MIN:MAX`) ends all processes and
starts them again. `run` then begins from the state of the last `commit()`, which process 0 keeps in a file named after
the job (`--rdzv-id`) in `$SCALEWISE_ELASTIC`, or `.scalewise-elastic` here: on several machines a shared folder. Unlike
Horovod's own launcher, processes never outlive a loss of others.
"""

from scalewise.horovod.torch.elastic.sampler import ElasticSampler
from scalewise.horovod.torch.elastic.state import ObjectState, State, TorchState, run

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
