/* AMX tile registers: eight of up to 16 rows of 64 bytes; a thread configures them before use and releases them
 * afterwards. The process requests permission from the OS earlier (g4ir/ui/processor.py). */
#pragma once
#include "common.h"

#ifdef __AMX_TILE__
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} amx_shapes __attribute__((aligned(LINE)));

static inline void shape_amx(const amx_shapes *shapes) {
    __asm__ volatile("ldtilecfg %0" : : "m"(*shapes) : "memory");
}
static inline void end_amx(void) { __asm__ volatile("tilerelease" : : : "memory"); }

/* Load register R from, or store it to, rows with a stride of APART bytes. */
#define LOAD_AMX(R, FROM, APART)                                                                    \
    __asm__ volatile("tileloadd (%0,%1), %%tmm" #R : : "r"(FROM), "r"((int64_t)(APART)) : "memory")
#define STORE_AMX(R, TO, APART)                                                                     \
    __asm__ volatile("tilestored %%tmm" #R ", (%0,%1)" : : "r"(TO), "r"((int64_t)(APART)) : "memory")
#define CLEAR_AMX(R) __asm__ volatile("tilezero %%tmm" #R : : :)
/* C += A B by the named instruction. */
#define MULTIPLY_AMX(NAME, C, A, B)                                                                 \
    __asm__ volatile(#NAME " %%tmm" #B ", %%tmm" #A ", %%tmm" #C : : :)
#endif
