/* What compiled programs call: kernels.c on tensors, through torch's stable C interface. What the
 * kernels decline goes on to the op in pyops.py. */
#include "kernels.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

typedef struct AtenTensorOpaque *tensor;
typedef int32_t status; /* 0: done */
status aoti_torch_get_data_ptr(tensor t, void **to);
status aoti_torch_get_dtype(tensor t, int32_t *to);
status aoti_torch_get_dim(tensor t, int64_t *to);
status aoti_torch_get_sizes(tensor t, int64_t **to);
status aoti_torch_is_contiguous(tensor t, bool *to);
status aoti_torch_new_tensor_handle(tensor t, tensor *to);
status aoti_torch_delete_tensor_object(tensor t);
status aoti_torch_empty_strided(int64_t dim, const int64_t *sizes, const int64_t *strides,
                                int32_t dtype, int32_t device, int32_t index, tensor *to);
status aoti_torch_call_dispatcher(const char *op, const char *overload, uint64_t *stack);
status torch_get_num_threads(uint32_t *to);
int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_dtype_bfloat16(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_dtype_float16(void);
int32_t aoti_torch_dtype_int8(void);
int32_t aoti_torch_dtype_uint8(void);
int32_t aoti_torch_dtype_int64(void);
int32_t aoti_torch_dtype_int32(void);
int32_t aoti_torch_dtype_int16(void);
int32_t aoti_torch_dtype_uint16(void);
int32_t aoti_torch_dtype_float8_e4m3fn(void);

/* Of Python, where that is the process: other threads of it run while a kernel does. */
#define MAYBE __attribute__((weak))
MAYBE int PyGILState_Check(void);
MAYBE void *PyEval_SaveThread(void);
MAYBE void PyEval_RestoreThread(void *state);

static void *without_lock(void) {
    return PyGILState_Check && PyGILState_Check() ? PyEval_SaveThread() : NULL;
}

static void with_lock(void *state) {
    if (state) PyEval_RestoreThread(state);
}

#define MOST_DIMS 8

typedef struct {
    void *data;
    int32_t dtype;
    int64_t dim, *sizes;
} view;

/* Whether a tensor can be read as one array. */
static bool viewed(tensor t, view *to) {
    bool whole = false;
    status failed = aoti_torch_get_data_ptr(t, &to->data) || aoti_torch_get_dtype(t, &to->dtype) ||
                    aoti_torch_get_dim(t, &to->dim) || aoti_torch_get_sizes(t, &to->sizes) ||
                    aoti_torch_is_contiguous(t, &whole);
    return !failed && whole && to->dim >= 1 && to->dim <= MOST_DIMS;
}

static int number(int32_t dtype) {
    if (dtype == aoti_torch_dtype_bfloat16()) return BF16;
    if (dtype == aoti_torch_dtype_float32()) return F32;
    return dtype == aoti_torch_dtype_float16() ? F16 : -1;
}

static int form_of(int32_t dtype) {
    if (dtype == aoti_torch_dtype_int8()) return INT8;
    if (dtype == aoti_torch_dtype_uint8()) return INT4;
    if (dtype == aoti_torch_dtype_int64()) return INT6;
    if (dtype == aoti_torch_dtype_int32()) return UINT4;
    if (dtype == aoti_torch_dtype_int16()) return UINT5;
    if (dtype == aoti_torch_dtype_uint16()) return INT5;
    return dtype == aoti_torch_dtype_float8_e4m3fn() ? FP8 : -1;
}

static int64_t rows_of(const view *x) {
    int64_t rows = 1;
    for (int64_t i = 0; i + 1 < x->dim; i++) rows *= x->sizes[i];
    return rows;
}

static int threads(void) {
    uint32_t count;
    return torch_get_num_threads(&count) ? 1 : (int)count;
}

/* A new tensor of x's dtype and sizes but for the last, which is n. */
static status made(const view *x, int64_t n, tensor *to, void **data) {
    int64_t sizes[MOST_DIMS], strides[MOST_DIMS], stride = 1;
    for (int64_t i = x->dim - 1; i >= 0; i--) {
        sizes[i] = i == x->dim - 1 ? n : x->sizes[i];
        strides[i] = stride;
        stride *= sizes[i];
    }
    return aoti_torch_empty_strided(x->dim, sizes, strides, x->dtype, aoti_torch_device_type_cpu(),
                                    0, to) ||
           aoti_torch_get_data_ptr(*to, data);
}

#define MOST_OPERANDS 10

/* The op of pyops.py, which takes its operands, tensors and then numbers, from the stack and leaves its
 * result there. */
static status dispatched_with(const char *op, int count, const tensor *operands, int more,
                              const uint64_t *numbers, tensor *out) {
    uint64_t stack[MOST_OPERANDS] = {0};
    for (int i = 0; i < more; i++) stack[count + i] = numbers[i];
    for (int i = 0; i < count; i++) {
        tensor owned;
        if (aoti_torch_new_tensor_handle(operands[i], &owned)) return 1;
        stack[i] = (uint64_t)(uintptr_t)owned;
    }
    status failed = aoti_torch_call_dispatcher(op, "", stack);
    *out = failed ? NULL : (tensor)(uintptr_t)stack[0];
    return failed;
}

static status dispatched(const char *op, int count, const tensor *operands, tensor *out) {
    return dispatched_with(op, count, operands, 0, NULL, out);
}

/* The result, once it is known whether memory was short: then the op of pyops.py says so. */
static status finished(int failed, const char *op, int count, const tensor *operands, tensor *out) {
    if (!failed) return 0;
    aoti_torch_delete_tensor_object(*out);
    return dispatched(op, count, operands, out);
}

status g4ir_call_linear(tensor x, tensor w, tensor *out) {
    static const char op[] = "g4ir::linear";
    tensor operands[] = {x, w};
    view a, b;
    void *y;
    if (!viewed(x, &a) || !viewed(w, &b) || a.dtype != b.dtype)
        return dispatched(op, 2, operands, out);
    int64_t n = b.sizes[0], k = b.sizes[1];
    int dtype = number(a.dtype);
    if (dtype != BF16 && dtype != F32 || !rows_of(&a)) return dispatched(op, 2, operands, out);
    if (made(&a, n, out, &y)) return 1;
    void *state = without_lock();
    int failed = g4ir_linear(b.data, a.data, y, dtype, rows_of(&a), n, k, threads());
    with_lock(state);
    return finished(failed, op, 2, operands, out);
}

static status linear_coded(const char *op, int rounded, tensor x, tensor codes, tensor scales,
                           int32_t tiles, tensor *out) {
    tensor operands[] = {x, codes, scales};
    uint64_t numbers[] = {tiles};
    view a, b, c;
    void *y;
    if (!viewed(x, &a) || !viewed(codes, &b) || !viewed(scales, &c) || number(c.dtype) < 0)
        return dispatched_with(op, 3, operands, 1, numbers, out);
    int dtype = number(a.dtype), form = form_of(b.dtype);
    int64_t rows = rows_of(&a), n = b.sizes[0], k = a.sizes[a.dim - 1], groups = c.sizes[1];
    int few = (tiles || !rounded) && g4ir_takes_codes(form, rounded, dtype, rows, k, groups);
    if (!few && !(tiles && g4ir_takes_gemm(form, rounded, dtype, rows, n, k, groups)))
        return dispatched_with(op, 3, operands, 1, numbers, out);
    if (made(&a, n, out, &y)) return 1;
    void *state = without_lock();
    int scales_dtype = number(c.dtype);
    int failed = few ? g4ir_linear_coded(b.data, form, tiles, c.data, scales_dtype, a.data, rounded,
                                         y, dtype, rows, n, k, groups, threads())
                     : g4ir_gemm(b.data, form, c.data, scales_dtype, a.data, rounded, y, dtype, rows, n,
                                 k, groups, threads());
    with_lock(state);
    if (!failed) return 0;
    aoti_torch_delete_tensor_object(*out);
    return dispatched_with(op, 3, operands, 1, numbers, out);
}

status g4ir_call_linear_coded(tensor x, tensor codes, tensor scales, int32_t tiles, tensor *out) {
    return linear_coded("g4ir::linear_coded", 0, x, codes, scales, tiles, out);
}

status g4ir_call_linear_rounded(tensor x, tensor codes, tensor scales, int32_t tiles,
                                tensor *out) {
    return linear_coded("g4ir::linear_rounded", 1, x, codes, scales, tiles, out);
}

static int held_as(int32_t dtype) {
    if (dtype == aoti_torch_dtype_int8()) return ROWS_INT8;
    return dtype == aoti_torch_dtype_float8_e4m3fn() ? ROWS_FP8 : number(dtype);
}

status g4ir_call_attend(tensor q, tensor positions, tensor written, tensor k, tensor v,
                        int64_t window, double scale, tensor *out) {
    static const char op[] = "g4ir::attend";
    tensor operands[] = {q, positions, written, k, v};
    uint64_t numbers[2] = {(uint64_t)window};
    memcpy(numbers + 1, &scale, sizeof scale);
    view of[5];
    void *y;
    bool whole = true;
    for (int i = 0; i < 5; i++) whole &= viewed(operands[i], of + i);
    int dtype = whole ? number(of[0].dtype) : -1, held = whole ? held_as(of[3].dtype) : -1;
    if ((dtype != BF16 && dtype != F32) || held < 0)
        return dispatched_with(op, 5, operands, 2, numbers, out);
    const int64_t *queries = of[0].sizes, *keys = of[3].sizes, d = queries[3];
    if (made(of, d, out, &y)) return 1;
    void *state = without_lock();
    int failed = g4ir_attend(of[0].data, of[1].data, of[2].data, of[3].data, of[4].data, y, dtype,
                             held, queries[0], queries[1], queries[2], keys[2], d, keys[0], keys[3],
                             window, scale, threads());
    with_lock(state);
    if (!failed) return 0;
    aoti_torch_delete_tensor_object(*out);
    return dispatched_with(op, 5, operands, 2, numbers, out);
}

status g4ir_call_attend_chunk(tensor q, tensor positions, tensor last, tensor written, tensor k,
                              tensor v, tensor fresh_k, tensor fresh_v, int64_t window,
                              double scale, tensor *out) {
    static const char op[] = "g4ir::attend_chunk";
    tensor operands[] = {q, positions, last, written, k, v, fresh_k, fresh_v};
    uint64_t numbers[2] = {(uint64_t)window};
    memcpy(numbers + 1, &scale, sizeof scale);
    view of[8];
    void *y;
    bool whole = true;
    for (int i = 0; i < 8; i++) whole &= viewed(operands[i], of + i);
    int held = whole ? held_as(of[4].dtype) : -1;
    if (!whole || !g4ir_takes_chunk(number(of[0].dtype), held, of[0].sizes[3]))
        return dispatched_with(op, 8, operands, 2, numbers, out);
    const int64_t *queries = of[0].sizes, *keys = of[4].sizes, d = queries[3];
    if (made(of, d, out, &y)) return 1;
    void *state = without_lock();
    int failed = g4ir_attend_chunk(of[0].data, of[1].data, of[2].data, of[3].data, of[4].data,
                                   of[5].data, of[6].data, of[7].data, y, number(of[0].dtype), held,
                                   queries[0], queries[1], queries[2], keys[2], d, keys[0], keys[3], window,
                                   scale, threads());
    with_lock(state);
    if (!failed) return 0;
    aoti_torch_delete_tensor_object(*out);
    return dispatched_with(op, 8, operands, 2, numbers, out);
}
