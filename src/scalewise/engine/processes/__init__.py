"""The process kit: how processes start, find each other, are watched and stopped, and what they say when they die.

- `launch`: this command again in several processes, through torch's elastic agent, with restarts
- `job`: processes beside the command: `Job` answers requests, `run` waits for the end, `call` collects return values
- `pool`: long-lived processes, each of which takes one piece of work after another
- `fork_server`: processes forked from one that has imported torch already
- `team`: the processes of a run, seen from one of them, and how they find each other
- `heartbeat`, `watchdog`: where a process is, and what ends one that hangs
- `signals`, `last_words`, `failures`: stop signals, exit reports and last lines, unexpected errors in words
- `memory`: what a process holds, may hold, and how out of memory differs from other errors

train, compare, measure, bench and horovod use it. It may import `engine.placement`, `engine.sums.tree`, `recipe`,
`records`, `files` and `errors`.
"""
