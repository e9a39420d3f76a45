/* The kernels of weights in one form, FORM (kernels.h), for the library of an engine that has such; with
 * ROUNDED, of rows that are rounded too. */
#include "product.h"

#include "vectors.h"

#include "gemm.h"

/* What is called so, of this form. */
#define OF_FORM(NAME) WITH(NAME, FORM)
#define WITH(NAME, END) JOINED(NAME, END)
#define JOINED(NAME, END) NAME##END

#include "quantised.h"

#include "tiles.h"

#include "quantised_calls.h"

#include "unpack.h"

#ifdef ROUNDED
#define TAKES_ROUNDED 1
#else
#define TAKES_ROUNDED 0
#endif

__attribute__((constructor)) static void add_form(void) {
    static const form_kernels own = {TAKES_ROUNDED, takes_codes, linear_coded, takes_gemm, coded_gemm, decode};
    g4ir_forms[FORM] = &own;
}
