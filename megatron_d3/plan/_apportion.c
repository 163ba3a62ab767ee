/* The loop of apportion.py in C: the same integers in the same order, hence the same domains.
 *
 * See apportion.py for the rule and for what the numbers mean; `_fill_python` there is the
 * reference and a test compares the two. Only the buffer protocol is used, so that building needs
 * Python's headers and a C compiler, not NumPy's.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

static const int64_t ONE = (int64_t)1 << 48;
static const double FAR = 9007199254740992.0; /* 2**53, later than any due date */

/* The domains with a weight, side by side for the scans. All arrays have `count` entries and zeros
 * up to `padded`, a multiple of 4. The doubles hold integers below 2**53, so their sums are exact; they are doubles because every
 * processor compares those by the vector. */
typedef struct {
    Py_ssize_t count, padded;
    double *weight; /* units a position */
    double *behind; /* carry in units */
    double *due;    /* last position for the next sample, counted from the block's first */
    int64_t *spare; /* (due + 1) * weight - units still to gain, in [0, weight) */
    int64_t *step;  /* ONE / weight */
    int64_t *rest;  /* ONE % weight */
    int16_t *name;  /* index among all domains */
} Active;

static int64_t floor_div(int64_t a, int64_t b) /* b > 0 */
{
    int64_t q = a / b;
    return q - (a % b < 0);
}

/* Move a due date on by one sample. */
static inline void advance(int64_t *due, int64_t *spare, int64_t weight, int64_t step, int64_t rest)
{
    int is_late = rest > *spare;
    *due += step + is_late;
    *spare += (is_late ? weight : 0) - rest;
}

/* slack[a] = positions 0..a minus samples due by a. */
static void start_block(Active *active, int32_t *slack, int64_t length)
{
    memset(slack, 0, (size_t)length * sizeof *slack);
    for (Py_ssize_t i = 0; i < active->count; i++) {
        int64_t weight = (int64_t)active->weight[i], target = ONE - (int64_t)active->behind[i];
        int64_t due = -floor_div(-target, weight) - 1;
        int64_t spare = (due + 1) * weight - target;
        active->due[i] = (double)due;
        active->spare[i] = spare;
        while (due < length) {
            slack[due > 0 ? due : 0] -= 1;
            advance(&due, &spare, weight, active->step[i], active->rest[i]);
        }
    }
    int32_t sum = 0;
    for (int64_t a = 0; a < length; a++) {
        sum += slack[a] + 1;
        slack[a] = sum;
    }
}

/* Two doubles in one register (SSE2, NEON), as GCC and clang write it. With 64 domains the scans are
 * most of the work: 1.4 times as fast as scalar code. */
typedef double Pair __attribute__((vector_size(16), aligned(8), may_alias));
typedef int64_t Mask __attribute__((vector_size(16)));

static inline Pair larger(Pair a, Pair b)
{
    Mask is_a = a > b;
    return (Pair)((is_a & (Mask)a) | (~is_a & (Mask)b));
}

/* Largest positive carry among the domains due by `limit`, the first of equals; -1 if none. With
 * `adds` the weights are added first, in the same pass. */
static inline Py_ssize_t largest(Active *active, double limit, int adds)
{
    const Pair *due = (const Pair *)active->due, *weight = (const Pair *)active->weight;
    Pair *behind = (Pair *)active->behind;
    Pair last = {limit, limit}, even = {0, 0}, odd = {0, 0};
    for (Py_ssize_t i = 0; i < active->padded / 2; i += 2) {
        if (adds) {
            behind[i] += weight[i];
            behind[i + 1] += weight[i + 1];
        }
        even = larger(even, (Pair)((due[i] <= last) & (Mask)behind[i]));
        odd = larger(odd, (Pair)((due[i + 1] <= last) & (Mask)behind[i + 1]));
    }
    even = larger(even, odd);
    double most = even[0] > even[1] ? even[0] : even[1];
    if (most == 0)
        return -1;
    Py_ssize_t pick = 0;
    while (!(active->behind[pick] == most && active->due[pick] <= limit))
        pick++;
    return pick;
}

/* Earliest due date among the domains with a positive carry; if none has one, largest carry. */
static Py_ssize_t earliest(const Active *active)
{
    const double *restrict behind = active->behind, *restrict due = active->due;
    double first = FAR, most = behind[0];
    for (Py_ssize_t i = 0; i < active->count; i++) {
        double value = behind[i] > 0 ? due[i] : FAR;
        first = value < first ? value : first;
        most = behind[i] > most ? behind[i] : most;
    }
    Py_ssize_t pick = 0;
    if (first < FAR)
        while (!(due[pick] == first && behind[pick] > 0))
            pick++;
    else /* all are ahead */
        while (behind[pick] != most)
            pick++;
    return pick;
}

/* Add the weights of position `now` and return its domain: `_pick` of apportion.py. */
static Py_ssize_t pick_domain(Active *active, const int32_t *slack, int64_t now, int64_t limit)
{
    Py_ssize_t pick = largest(active, (double)limit, 1);
    if (pick >= 0) {
        int64_t due = (int64_t)active->due[pick], tight = now;
        while (tight < due && slack[tight] > 0)
            tight++;
        if (tight >= due)
            return pick;
        pick = largest(active, (double)tight, 0);
        if (pick >= 0)
            return pick;
    }
    return earliest(active);
}

static void fill_block(Active *active, int32_t *slack, int16_t *domains, int64_t num_positions,
                       int64_t horizon)
{
    int64_t length = num_positions + horizon;
    start_block(active, slack, length);
    for (int64_t now = 0; now < num_positions; now++) {
        Py_ssize_t pick = pick_domain(active, slack, now, now + horizon);
        int64_t due = (int64_t)active->due[pick], end = due < length ? due : length;
        for (int64_t a = now + 1; a < end; a++)
            slack[a] -= 1;
        active->behind[pick] -= (double)ONE;
        advance(&due, &active->spare[pick], (int64_t)active->weight[pick], active->step[pick],
                active->rest[pick]);
        active->due[pick] = (double)due;
        domains[now] = active->name[pick];
    }
}

/* Collect the domains with a weight; the arrays are carved from one allocation. */
static int open_active(Active *active, const int64_t *units, const int64_t *lag, Py_ssize_t count)
{
    Py_ssize_t length = (count + 3) / 4 * 4;
    double *reals = PyMem_Calloc((size_t)length * 7, 8); /* 7 arrays of 8 bytes or less an entry */
    if (reals == NULL)
        return -1;
    active->weight = reals;
    active->behind = reals + length;
    active->due = reals + 2 * length;
    int64_t *integers = (int64_t *)(reals + 3 * length);
    active->spare = integers;
    active->step = integers + length;
    active->rest = integers + 2 * length;
    active->name = (int16_t *)(integers + 3 * length);
    active->count = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (units[i] > 0) {
            Py_ssize_t at = active->count++;
            active->weight[at] = (double)units[i];
            active->behind[at] = (double)lag[i];
            active->step[at] = ONE / units[i];
            active->rest[at] = ONE % units[i];
            active->name[at] = (int16_t)i;
        }
    active->padded = (active->count + 3) / 4 * 4;
    return 0;
}

/* 0 when done, -1 without memory, -2 when no domain has a weight. */
static int fill_all(const Py_buffer *units, Py_buffer *lag, Py_buffer *domains, int64_t horizon,
                    int64_t block)
{
    Active active;
    if (open_active(&active, units->buf, lag->buf, units->len / (Py_ssize_t)sizeof(int64_t)) < 0)
        return -1;
    int32_t *slack = PyMem_Malloc((size_t)(block + horizon) * sizeof *slack);
    if (slack == NULL || active.count == 0) {
        PyMem_Free(active.weight);
        PyMem_Free(slack);
        return slack == NULL ? -1 : -2;
    }
    int64_t total = domains->len / (Py_ssize_t)sizeof(int16_t);
    Py_BEGIN_ALLOW_THREADS
    for (int64_t start = 0; start < total; start += block) {
        int64_t count = total - start < block ? total - start : block;
        fill_block(&active, slack, (int16_t *)domains->buf + start, count, horizon);
    }
    for (Py_ssize_t i = 0; i < active.count; i++)
        ((int64_t *)lag->buf)[active.name[i]] = (int64_t)active.behind[i];
    Py_END_ALLOW_THREADS
    PyMem_Free(slack);
    PyMem_Free(active.weight);
    return 0;
}

static PyObject *fill(PyObject *self, PyObject *args)
{
    Py_buffer units, lag, domains;
    long long horizon, block;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*w*LL", &units, &lag, &domains, &horizon, &block))
        return NULL;
    int result = -2;
    if (units.len == lag.len && horizon >= 0 && block >= 1 &&
        block + horizon <= 8192) /* so that a block's targets stay below 2**62 units */
        result = fill_all(&units, &lag, &domains, horizon, block);
    PyBuffer_Release(&units);
    PyBuffer_Release(&lag);
    PyBuffer_Release(&domains);
    if (result == -1)
        return PyErr_NoMemory();
    if (result == -2) {
        PyErr_SetString(PyExc_ValueError, "_apportion.fill: sizes do not fit, or no weight");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fill", fill, METH_VARARGS,
     "fill(units int64, lag int64, domains int16, horizon, block): see apportion._fill_python."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_apportion", "Compiled loop of megatron_d3.plan.apportion.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__apportion(void)
{
    return PyModule_Create(&module);
}
