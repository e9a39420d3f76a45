"""`g4ir bench`: speed with agreement, a roofline and a baseline, all measured in one process.

workload.py   lengths, batch size, depth, and the tokens
runners.py    one way to run it: an engine, or the interpreter on its params
peers.py      baselines: the same by transformers
measure.py    interleaved rounds and their statistics
agreement.py  whether the outputs are the same
work.py       bytes and FLOPs of the workload, experts counted
calls.py      compiled regions and kernels of a decode step
roof.py       roofline: this machine's bandwidth and matmul rate now
system.py     machine, versions, memory
stats.py      values with a spread
report.py     the whole run as a report
schema.py     records of a report, its JSON
text.py       a report as text
plot.py       a report as a plot
compare.py    two reports side by side
"""
