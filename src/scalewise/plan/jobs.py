"""How a row is started: the command, and job files for SLURM, Kubernetes and SkyPilot.

JSON strings are YAML strings too, so everything that comes from outside is written as one.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass
from typing import Literal

from scalewise.plan.model import devices_used

System = Literal["slurm", "kubernetes", "trainjob", "skypilot"]
IN_CONTAINERS = ("kubernetes", "trainjob")
PORT = 29500
TIME_RESERVE = 1.5  # of the longest time planned, before a scheduler may end the job …
START_SECONDS = 600  # … and for starting: images, imports, data


@dataclass(frozen=True)
class Job:
    """A training on some nodes."""

    name: str
    arguments: tuple[str, ...]  # of `scalewise`, as in ("train", "digits", "--workers", "8")
    workers: int
    node_devices: int
    seconds: float  # that it may take, the high end of the plan's interval
    accelerator: str | None = None  # as the system names it, such as A100; None for CPUs
    image: str = ""  # of the container, for Kubernetes

    @property
    def nodes(self) -> int:
        """As few as hold equally many workers each, with a device for every worker."""
        return self.workers // self.processes

    @property
    def processes(self) -> int:
        """On each node: as the plan reckons with."""
        return devices_used(self.workers, self.node_devices)

    @property
    def label(self) -> str:
        """A name that every system takes: it begins with a letter and has at most 50 characters.

        >>> Job("My_task.py", (), 1, 1, 1.0).label, Job("3d.py", (), 1, 1, 1.0).label
        ('my-task-py', 'job-3d-py')
        """
        name = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") or "job"
        return (name if name[0].isalpha() else f"job-{name}")[:50].strip("-")


def command(job: Job) -> str:
    """The line to type: on one node, or on each of several."""
    if job.nodes == 1:
        processes = [] if job.workers == 1 else ["--processes", str(job.workers)]
        return shlex.join(["scalewise", *job.arguments, *processes])
    return _torchrun(job, "$NODE_RANK", "$MASTER_ADDR")


def _torchrun(job: Job, rank: str, address: str) -> str:
    words = shlex.join(["-m", "scalewise", *job.arguments])
    where = f"--nnodes {job.nodes} --nproc-per-node {job.processes} --node-rank {rank} --master-addr {address}"
    return f"torchrun {where} --master-port {PORT} {words}"


def job_file(system: System, job: Job) -> tuple[str, str]:
    """The name and the text of a job file."""
    writers = {"slurm": _slurm, "kubernetes": _kubernetes, "trainjob": _trainjob, "skypilot": _skypilot}
    return writers[system](job)


def _slurm(job: Job) -> tuple[str, str]:
    """A batch script; srun starts torchrun once on every node."""
    minutes = math.ceil((START_SECONDS + job.seconds * TIME_RESERVE) / 60)
    gpus = f"#SBATCH --gpus-per-node={shlex.quote(job.accelerator)}:{job.processes}\n" if job.accelerator else ""
    inner = _torchrun(job, "$SLURM_NODEID", '"$MASTER_ADDR"')
    return "job.slurm", (
        "#!/bin/bash\n"
        f"#SBATCH --job-name={job.label}\n"
        f"#SBATCH --nodes={job.nodes}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"{gpus}"
        f"#SBATCH --time={minutes}\n"
        "set -euo pipefail\n"
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        f"srun bash -c {shlex.quote(inner)}\n"
    )


def _kubernetes(job: Job) -> tuple[str, str]:
    """A PyTorchJob of the Kubeflow training operator, which sets RANK, MASTER_ADDR and MASTER_PORT in every pod."""
    script = _torchrun(job, "$RANK", "$MASTER_ADDR")
    limits = (
        f'\n              resources: {{"limits": {{"nvidia.com/gpu": {job.processes}}}}}' if job.accelerator else ""
    )
    label = json.dumps({"nvidia.com/gpu.product": job.accelerator})  # as NVIDIA's device discovery names it
    selector = f"\n          nodeSelector: {label}" if job.accelerator else ""

    def replica(kind: str, count: int) -> str:
        return f"""    {kind}:
      replicas: {count}
      restartPolicy: OnFailure
      template:
        spec:{selector}
          containers:
            - name: pytorch
              image: {json.dumps(job.image)}
              command: ["/bin/sh", "-c", {json.dumps("exec " + script)}]{limits}
"""

    others = replica("Worker", job.nodes - 1) if job.nodes > 1 else ""
    return "job.kubernetes.yaml", (
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\n"
        f"metadata:\n  name: {json.dumps(job.label)}\n"
        f"spec:\n  pytorchReplicaSpecs:\n{replica('Master', 1)}{others}"
    )


def _trainjob(job: Job) -> tuple[str, str]:
    """A TrainJob of Kubeflow Trainer 2, whose torch runtime passes nodes and processes to torchrun (PET_…)."""
    words = ["torchrun", "-m", "scalewise", *job.arguments]
    limits = f'\n    resourcesPerNode: {{"limits": {{"nvidia.com/gpu": {job.processes}}}}}' if job.accelerator else ""
    return "job.trainjob.yaml", (
        "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\n"
        f"metadata:\n  name: {json.dumps(job.label)}\n"
        "spec:\n  runtimeRef:\n    name: torch-distributed\n"
        f"  trainer:\n    image: {json.dumps(job.image)}\n    command: {json.dumps(words)}\n"
        f"    numNodes: {job.nodes}\n    numProcPerNode: {job.processes}{limits}\n"
    )


def _skypilot(job: Job) -> tuple[str, str]:
    """A SkyPilot task; its nodes know their addresses and rank."""
    resources = f"\nresources:\n  accelerators: {json.dumps(f'{job.accelerator}:{job.processes}')}\n"
    script = _torchrun(job, "$SKYPILOT_NODE_RANK", "$MASTER_ADDR")
    return "job.skypilot.yaml", (
        f"name: {json.dumps(job.label)}\nnum_nodes: {job.nodes}\n"
        f"{resources if job.accelerator else ''}"
        "workdir: .\n"
        "setup: |\n  pip install scalewise\n"
        "run: |\n"
        '  MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
        f"  {script.replace(chr(10), chr(10) + '  ')}\n"
    )
