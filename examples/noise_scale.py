"""How many workers are worth it? Train with one worker in micro batches and read the noise scale.

python examples/noise_scale.py
"""

import scalewise as sw

if __name__ == "__main__":
    task = sw.load_task("digits")
    recipe = sw.Recipe(worker_batch=128, micro_batch=16, epochs=10.0, lr=0.05)
    for record in sw.train(task, recipe):
        if isinstance(record, sw.Step) and record.step % 20 == 0:
            shown = "not known yet" if record.noise_scale is None else f"{record.noise_scale:6.1f} samples"
            print(f"step {record.step:3d}  loss {record.loss:.3f}  noise scale {shown}")
        if isinstance(record, sw.Result) and record.noise_scale is not None:
            print(f"at the end: {record.noise_scale}")
