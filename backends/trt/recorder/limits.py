"""Numbers that TensorRT's documentation names; who writes networks may ask for them here."""

#: `Dims.MAX_DIMS`
MAX_DIMS = 8
#: the operator page of TopK
MAX_TOP_K = 3840
#: elements of a tensor: "volume limits" of the operator pages
MAX_VOLUME = 2**31 - 1
#: bytes of constants that may come in through an input layer of a conditional, which copies them
#: at each step: the recorder's own, no layer of TensorRT has it
MAX_ENTERING = 1 << 20
#: bytes of weights above which a plan is to be written piece by piece: in memory it would be held
#: twice, by the builder and by who asked for it. The recorder's own too.
MAX_HELD = 1 << 30
#: bytes at whose multiples tensors and scratch memory begin: documentation of `setTensorAddress`
#: says 256, which torch keeps on a GPU; here memory is numpy's too, which keeps 16
ALIGNMENT = 16
#: bytes of dynamic shared memory that every launch may ask for; for more of them a kernel's
#: attribute is to be set first (CUDA programming guide), and nothing says that TensorRT does so for
#: a plugin's
SHARED_BYTES = 48 * 1024
