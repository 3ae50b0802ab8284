"""An elastic training that loses a process once, if it is told to.

python -m torch.distributed.run --nproc-per-node 2 --max-restarts 1 horovod_elastic.py OUT [kill]
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import scalewise.horovod.torch as hvd

EPOCHS = 2


def main(out: Path, kill: bool) -> None:
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(hvd.rank() + 7 * int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 4, generator=generator), torch.arange(48))
    model = torch.nn.Linear(4, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    sampler = hvd.elastic.ElasticSampler(data)
    resets: list[int] = []
    begun: list[int] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        begun.append(state.shared.epoch)
        while state.epoch < EPOCHS:
            for number, (x, samples) in enumerate(DataLoader(data, 4, sampler=sampler)):
                optimizer.zero_grad()
                F.mse_loss(model(x), x[:, :2]).backward()
                optimizer.step()
                sampler.record_batch(number, len(x))
                state.seen = [*state.seen, *hvd.allgather(samples).tolist()]
                state.commit()
                if kill and hvd.rank() == 1 and state.epoch == 1 and number == 2 and not resets:
                    os.kill(os.getpid(), signal.SIGKILL)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.shared.set_epoch(state.epoch)
            state.commit()

    shared = DistributedSampler(data, hvd.size(), hvd.rank())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, shared=shared, epoch=0, seen=[])
    if hvd.rank() == 0:
        out.mkdir(exist_ok=True)
        torch.manual_seed(0)
        model.reset_parameters()
        state.save()
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state)
    if hvd.rank() == 0:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        found = {"digest": digest, "seen": state.seen, "resets": resets, "begun": begun[0]}
        (out / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "kill" in sys.argv)
