"""How a task is trained: `loop.train` is a generator of records, and weights are a function of task and recipe alone.

    loop, pace, evaluate      the loop and its step; learning rates and progress; loss and metrics over a data set
    checks                    labels that do not fit, numbers that stop being finite
    placement, auto           processes and devices, which never change the result; what a recipe leaves to be derived
    data, sums, update        which samples, which sums, which update
    parallel, store           how processes share a step; what is written to the disk
    processes                 how processes are started, watched and ended

Public: `train`, `Training`, `Placement`. Imports stats, tasks, nn, optim, schedules and the frozen values below them.
"""
