/* The CPU kernels (kernels.h), one file per family. They are one translation unit: attention and
 * quantised products inline the loops of product.h. */
#include "product.h"

#include "gemm.h"

#include "float.h"

#include "quantised.h"

#include "tiles.h"

#include "quantised_calls.h"

#include "unpack.h"

#include "attention.h"

#include "prefill_attention.h"
