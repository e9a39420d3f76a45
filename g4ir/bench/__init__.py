"""`g4ir bench`: speed with agreement, a roofline and a baseline, all measured in one process.

workload.py   lengths, batch size, depth, and the tokens
runners.py    ways to run it: an engine, the interpreter on its params, transformers
measure.py    interleaved rounds and their statistics
agreement.py  whether the outputs are the same
work.py       bytes and FLOPs of the workload, experts counted
roof.py       roofline: this machine's bandwidth and matmul rate now
system.py     machine, versions, memory
stats.py      values with a spread
report.py     the whole run as a report
schema.py     records of a report, its JSON
text.py       a report as text and as a plot
compare.py    two reports side by side
"""
