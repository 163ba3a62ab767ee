/* The sketches of sketch.py in C: one pass over a shard, at the speed of memory for `rotation`.
 *
 * sketch_torch.py says what each computes and is the reference; sums are rounded differently, and
 * tests hold the two within 1e-6. Only the buffer protocol is used, so that building needs Python's
 * headers and a C compiler, not NumPy's or PyTorch's.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* With glibc, GCC compiles the loops for several generations of processors and picks at load time.
 * No sum changes its order or is fused (-ffp-contract=off), so that all give the same bits. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define CLONES __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#endif
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

enum { FLUSH = 256 };
/* Of a dense sketch, whose every number is the sum of all elements: float32 rounds 256 of them to
 * 1.7e-6 of the vector's norm. Its normal numbers take so long that more flushes cost nothing. */
enum { FEW = 16 };

typedef struct { /* as in layout.py */
    long long global_start, num_runs, run_length, global_stride, local_start, local_stride;
} Shard;

typedef struct {
    int64_t dim;
    uint64_t keys[2];
} Map;

INLINE uint64_t hash64(uint64_t number, uint64_t key)
{
    uint64_t word = (number + 1) * UINT64_C(0x9E3779B97F4A7C15) + key;
    word = (word ^ (word >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    word = (word ^ (word >> 27)) * UINT64_C(0x94D049BB133111EB);
    return word ^ (word >> 31);
}

INLINE int64_t hash_below(uint64_t word, int64_t stop) /* stop < 2**31 */
{
    return (int64_t)(((word >> 32) * (uint64_t)stop) >> 32);
}

INLINE float flip_float(float x, uint32_t bits)
{
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    word ^= bits & UINT32_C(0x80000000);
    memcpy(&x, &word, sizeof x);
    return x;
}

INLINE double flip_double(double x, uint64_t bits)
{
    uint64_t word;
    memcpy(&word, &x, sizeof word);
    word ^= bits & UINT64_C(0x8000000000000000);
    memcpy(&x, &word, sizeof x);
    return x;
}

/* log of a normal number in (0, 1]: with x = 2**e * m, m in [sqrt(1/2), sqrt(2)) and
 * s = (m - 1) / (m + 1), log m = 2 (s + s^3/3 + s^5/5 + ...). */
INLINE float log_of(float x)
{
    int32_t word;
    memcpy(&word, &x, sizeof word);
    int32_t exponent = (word - 0x3F3504F3) >> 23; /* bits of sqrt(1/2) */
    word -= exponent * (1 << 23);
    float m;
    memcpy(&m, &word, sizeof m);
    float s = (m - 1) / (m + 1), z = s * s;
    float series = 1 + z * (1 / 3.0f + z * (1 / 5.0f + z * (1 / 7.0f + z * (1 / 9.0f))));
    return (float)exponent * 0.693147181f + 2 * s * series;
}

/* 2 * 64 normal numbers by Box and Muller: of rows row .. row + 63, and of those of the sines. */
INLINE void normals(uint64_t row, uint64_t key, float *restrict cosine, float *restrict sine)
{
    int32_t upper[64], lower[64];
    for (int j = 0; j < 64; j++) {
        uint64_t word = hash64(row + (uint64_t)j, key);
        upper[j] = (int32_t)(word >> 33);
        lower[j] = (int32_t)(uint32_t)word;
    }
    for (int j = 0; j < 64; j++) {
        float uniform = (float)upper[j] * 0x1p-31f + 0x1p-32f; /* in (0, 1] */
        float radius = sqrtf(-2 * log_of(uniform));
        float a = (float)lower[j] * (0.785398163f * 0x1p-31f), z = a * a; /* |a| <= pi / 4 */
        float s = a * (1 - z / 6.0f * (1 - z / 20.0f * (1 - z / 42.0f * (1 - z / 72.0f))));
        float c = 1 - z / 2.0f * (1 - z / 12.0f * (1 - z / 30.0f * (1 - z / 56.0f)));
        c = flip_float(c, (uint32_t)lower[j] << 30); /* bit 1 */
        int is_swapped = lower[j] & 1;
        cosine[j] = radius * (is_swapped ? s : c);
        sine[j] = radius * (is_swapped ? c : s);
    }
}

INLINE float widen(uint16_t x) /* a bfloat16 is the upper half of a float */
{
    uint32_t word = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &word, sizeof wide);
    return wide;
}

#define REAL float
#define WORD uint32_t
#define SIGN 31
#define FLIP flip_float
#define VALUE float
#define LOAD(x) (x)
#define KERNEL(name) name##_float
#include "_sketch_kernels.h"
#undef VALUE
#undef LOAD
#undef KERNEL
#define VALUE uint16_t
#define LOAD(x) widen(x)
#define KERNEL(name) name##_bfloat16
#include "_sketch_kernels.h"
#undef REAL
#undef WORD
#undef SIGN
#undef FLIP
#undef VALUE
#undef LOAD
#undef KERNEL
#define REAL double
#define WORD uint64_t
#define SIGN 63
#define FLIP flip_double
#define VALUE double
#define LOAD(x) (x)
#define KERNEL(name) name##_double
#include "_sketch_kernels.h"

typedef struct { /* one kind, by the bytes of a value: 2 for bfloat16 */
    void (*of_2)(const uint16_t *, const Shard *, const Map *, float *, double *);
    void (*of_4)(const float *, const Shard *, const Map *, float *, double *);
    void (*of_8)(const double *, const Shard *, const Map *, double *, double *);
} Loops;

/* Tell whether all runs lie in the local tensor; no product that could overflow. */
static int fits(const Shard *s, Py_ssize_t num_values)
{
    if (s->num_runs < 1 || s->run_length < 1 || s->global_start < 0 || s->local_start < 0 ||
        s->global_stride < 0 || s->local_stride < 0)
        return 0;
    if (s->run_length > num_values || s->local_start > num_values - s->run_length)
        return 0;
    long long rest = num_values - s->run_length - s->local_start;
    return s->num_runs == 1 || (s->local_stride > 0 && s->num_runs - 1 <= rest / s->local_stride);
}

static PyObject *apply(PyObject *args, const Loops *loops)
{
    Py_buffer values, out;
    Shard shard;
    unsigned long long keys[2];
    int item_bytes;
    if (!PyArg_ParseTuple(args, "y*i(LLLLLL)(KK)w*", &values, &item_bytes, &shard.global_start,
                          &shard.num_runs, &shard.run_length, &shard.global_stride,
                          &shard.local_start, &shard.local_stride, &keys[0], &keys[1], &out))
        return NULL;
    Map map = {out.len / (Py_ssize_t)sizeof(double), {keys[0], keys[1]}};
    int is_valid = (item_bytes == 2 || item_bytes == 4 || item_bytes == 8) && map.dim >= 1 &&
                   map.dim < INT32_MAX && fits(&shard, values.len / item_bytes);
    void *sum = is_valid ? PyMem_Calloc((size_t)map.dim + 1, item_bytes == 8 ? 8 : 4) : NULL;
    if (sum != NULL) {
        Py_BEGIN_ALLOW_THREADS
        if (item_bytes == 2)
            loops->of_2(values.buf, &shard, &map, sum, out.buf);
        else if (item_bytes == 4)
            loops->of_4(values.buf, &shard, &map, sum, out.buf);
        else
            loops->of_8(values.buf, &shard, &map, sum, out.buf);
        Py_END_ALLOW_THREADS
        PyMem_Free(sum);
    }
    PyBuffer_Release(&values);
    PyBuffer_Release(&out);
    if (!is_valid) {
        PyErr_SetString(PyExc_ValueError, "_sketch: sizes do not fit");
        return NULL;
    }
    if (sum == NULL)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *rotation(PyObject *self, PyObject *args)
{
    static const Loops loops = {rotation_bfloat16, rotation_float, rotation_double};
    (void)self;
    return apply(args, &loops);
}

static PyObject *count(PyObject *self, PyObject *args)
{
    static const Loops loops = {count_bfloat16, count_float, count_double};
    (void)self;
    return apply(args, &loops);
}

static PyObject *gaussian(PyObject *self, PyObject *args)
{
    static const Loops loops = {gaussian_bfloat16, gaussian_float, gaussian_double};
    (void)self;
    return apply(args, &loops);
}

#define ARGUMENTS "(values, bytes of an item, (global_start, num_runs, run_length, "         \
                  "global_stride, local_start, local_stride), (key, key), out (dim,) zeros): " \
                  "see sketch_torch."

static PyMethodDef methods[] = {
    {"rotation", rotation, METH_VARARGS, "rotation" ARGUMENTS "rotation."},
    {"count", count, METH_VARARGS, "count" ARGUMENTS "count."},
    {"gaussian", gaussian, METH_VARARGS, "gaussian" ARGUMENTS "gaussian."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_sketch", "Compiled loops of megatron_d3.influence.sketch.", -1,
    methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__sketch(void)
{
    return PyModule_Create(&module);
}
