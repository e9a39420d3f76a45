"""Plugins that no device has run yet: Triton kernels as layers of a TensorRT network, for the
experts of a mixture and for attention over full-length caches. `forms.py` alone knows of them."""
