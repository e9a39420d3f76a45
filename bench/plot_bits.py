"""Plot the divergence over the bits of a table: python bench/plot_bits.py RESULTS.txt OUT.png"""

import sys

from g4ir.ui.plots import figure

with open(sys.argv[1]) as lines, figure(sys.argv[2], 6, 3.6) as axes:
    for bits, kl, *_, who, name in (r for r in map(str.split, lines) if len(r) == 7):
        color = f"C{('g4ir', 'ik_llama.cpp', 'llama.cpp').index(who)}"
        axes.plot(float(bits), float(kl), "o", color=color)
        axes.annotate(f"  {name}", (float(bits), float(kl)), fontsize=7, color=color)
    axes.set(xlabel="bits per weight", ylabel="KL divergence", yscale="log", xlim=(3.1, 4.7))
