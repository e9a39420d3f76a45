"""`g4ir bench`: speed beside agreement, a roof and a peer, all measured in one process.

workload.py   what is asked: lengths, rows, depth, and the tokens
runners.py    one way to run it: an engine, or the interpreter on its params
peers.py      the same by transformers
measure.py    interleaved rounds and what is read off them
agreement.py  whether the outputs are the same
work.py       bytes and FLOPs of the workload, experts counted
breakdown.py  where a step's time goes
roof.py       bandwidth and matmul rate of this machine now
system.py     machine, versions, memory
stats.py      numbers with a spread
report.py     the whole run as a report
schema.py     the form of a report
text.py       a report for people, and as CSV
compare.py    two reports side by side
"""
