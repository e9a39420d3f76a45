/* Vectors of numbers, and how many sums of products registers hold. */
#ifdef __AVX512F__
#define VECTOR 64
#else
#define VECTOR 32
#endif
typedef float vector __attribute__((vector_size(VECTOR)));
typedef float any_vector __attribute__((vector_size(VECTOR), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(VECTOR)));
typedef uint32_t any_words __attribute__((vector_size(VECTOR), aligned(2), may_alias));
typedef struct {
    vector first, second;
} pair;
#define PAIR (int64_t)(sizeof(pair) / sizeof(float))

/* Of bf16, the even numbers and then the odd ones: one instruction makes each wide. Rows of x are
 * brought into that order. */
static inline pair pair_bf16(const bf16 *p) {
    words u = *(const any_words *)p;
    return (pair){(vector)(u << 16), (vector)(u & 0xffff0000u)};
}

static inline pair pair_f32(const float *p) {
    const any_vector *v = (const any_vector *)p;
    return (pair){v[0], v[1]};
}

#ifdef __AVX512F__
#define REGISTERS 24
#define DOTS_WIDE(NAME) DOTS(NAME, ONE_TO_8, SUMS_24, NONE)
#define DOTS_BLOCKS(NAME) DOTS(NAME, ONE_TO_6, SUMS_12, NONE)
#define DOTS_GROUPS(NAME) DOTS(NAME, ONE_TO_6, NONE, ONE_TO_6)
#else
#define REGISTERS 12
#define DOTS_WIDE(NAME) DOTS(NAME, ONE_TO_8, SUMS_12, ONE_7_8)
#define DOTS_BLOCKS(NAME) DOTS(NAME, ONE_TO_4, SUMS_4, ONE_3_4)
#define DOTS_GROUPS(NAME) DOTS(NAME, ONE_TO_4, NONE, ONE_TO_4)
#endif
