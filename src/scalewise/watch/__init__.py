"""Other people's training loops: hooks that see what happens and never change it.

May import `runs` and below, and torch.

- `watcher`: `watch`, `Watcher`: writes what `scalewise doctor` needs; `steps`, `gradients` and `fingerprints` are what
  it takes down of a step.
- `noise`: `NoiseScale` with `watch_ddp` and `watch_accumulation`: the noise scale alone, in any loop, through the same
  hooks of `gradients`.
"""
