/* The loops of kernels.py in C: the same integers in the same order, hence the same orders.
 *
 * See kernels.py for what is computed; the functions named `_..._python` there are the reference and
 * a test compares the two. Only the buffer protocol is used, so that building needs Python's headers
 * and a C compiler, not NumPy's.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* An order under search. `weights` is (count, count), whole numbers, antisymmetric. */
typedef struct {
    const int64_t *weights;
    int64_t count;
    int64_t *order; /* unit at each position */
    int64_t *place; /* position of each unit */
} Search;

/* Take the unit at position `from` out and put it back at position `to`. */
static void move_unit(Search *search, int64_t from, int64_t to)
{
    int64_t *order = search->order, unit = order[from];
    int64_t step = from < to ? 1 : -1;
    for (int64_t p = from; p != to; p += step) {
        order[p] = order[p + step];
        search->place[order[p]] = p;
    }
    order[to] = unit;
    search->place[unit] = to;
}

/* Change of the cost when the units at two positions change places. */
static int64_t swap_cost(const Search *search, int64_t p, int64_t q)
{
    const int64_t *order = search->order, first = p < q ? p : q, last = p < q ? q : p;
    const int64_t *a = search->weights + order[first] * search->count;
    const int64_t *b = search->weights + order[last] * search->count;
    int64_t sum = a[order[last]];
    for (int64_t m = first + 1; m < last; m++)
        sum += a[order[m]] - b[order[m]];
    return sum;
}

static void swap_units(Search *search, int64_t p, int64_t q)
{
    int64_t *order = search->order, unit = order[p];
    order[p] = order[q];
    order[q] = unit;
    search->place[order[p]] = p;
    search->place[order[q]] = q;
}

/* Lowest change of the cost by moving the unit at `from`, and where to: later places first, near
 * ones before far ones; 0 and `from` if no move lowers it. */
static int64_t best_move(const Search *search, int64_t from, int64_t *to)
{
    const int64_t *order = search->order;
    const int64_t *row = search->weights + order[from] * search->count;
    int64_t best = 0, sum = 0;
    *to = from;
    for (int64_t p = from + 1; p < search->count; p++) {
        sum += row[order[p]];
        if (sum < best) {
            best = sum;
            *to = p;
        }
    }
    sum = 0;
    for (int64_t p = from - 1; p >= 0; p--) {
        sum -= row[order[p]];
        if (sum < best) {
            best = sum;
            *to = p;
        }
    }
    return best;
}

/* Move units to their best places, one after the other, until none has a better one. */
static int64_t descend(Search *search)
{
    int64_t total = 0, unit = 0, num_idle = 0;
    while (num_idle < search->count) {
        int64_t from = search->place[unit], to, change = best_move(search, from, &to);
        if (change < 0) {
            move_unit(search, from, to);
            total += change;
            num_idle = 0;
        }
        else
            num_idle++;
        unit = unit + 1 < search->count ? unit + 1 : 0;
    }
    return total;
}

/* Swap `num_swaps` pairs of positions, descend, go back if that is worse by more than the round's
 * limit; and so on. At the end take the best order seen, the first of equals. `memory` has room for
 * two orders. */
static void iterate(Search *search, const int64_t *pairs, int64_t num_swaps, const int64_t *limits,
                    int64_t num_rounds, int64_t *memory)
{
    int64_t *kept = memory, *best = memory + search->count;
    size_t size = (size_t)search->count * sizeof *kept;
    int64_t gain = 0; /* change of the cost since the best order */
    descend(search);
    memcpy(kept, search->order, size);
    memcpy(best, search->order, size);
    for (int64_t round = 0; round < num_rounds; round++) {
        int64_t change = 0;
        for (int64_t i = 0; i < num_swaps; i++, pairs += 2) {
            change += swap_cost(search, pairs[0], pairs[1]);
            swap_units(search, pairs[0], pairs[1]);
        }
        change += descend(search);
        if (change > limits[round]) {
            memcpy(search->order, kept, size);
            for (int64_t p = 0; p < search->count; p++)
                search->place[kept[p]] = p;
            continue;
        }
        memcpy(kept, search->order, size);
        gain += change;
        if (gain < 0) {
            gain = 0;
            memcpy(best, search->order, size);
        }
    }
    memcpy(search->order, best, size);
}

/* Swap each pair of positions in turn where that lowers the cost. */
static void swap_pairs(Search *search, const int64_t *pairs, int64_t num_pairs)
{
    for (int64_t i = 0; i < num_pairs; i++, pairs += 2)
        if (swap_cost(search, pairs[0], pairs[1]) < 0)
            swap_units(search, pairs[0], pairs[1]);
}

/* Integers of a buffer in [0, limit)? */
static int are_below(const int64_t *values, int64_t num, int64_t limit)
{
    for (int64_t i = 0; i < num; i++)
        if (values[i] < 0 || values[i] >= limit)
            return 0;
    return 1;
}

typedef struct {
    Py_buffer weights, order, pairs;
    int64_t num_pairs;
    Search search;
    int64_t *memory; /* three times `count` */
} Call;

static void close_call(Call *call)
{
    PyMem_Free(call->memory);
    PyBuffer_Release(&call->weights);
    PyBuffer_Release(&call->order);
    PyBuffer_Release(&call->pairs);
}

/* Check that the buffers fit each other; 0 with an exception set if not. */
static int open_call(Call *call)
{
    int64_t size = (int64_t)sizeof(int64_t), count = call->order.len / size;
    int64_t *order = call->order.buf;
    call->num_pairs = call->pairs.len / (2 * size);
    call->memory = PyMem_Calloc((size_t)(3 * count + 1), sizeof(int64_t));
    if (call->memory == NULL) {
        close_call(call);
        PyErr_NoMemory();
        return 0;
    }
    if (call->weights.len != count * count * size || !are_below(order, count, count) ||
        !are_below(call->pairs.buf, 2 * call->num_pairs, count)) {
        close_call(call);
        PyErr_SetString(PyExc_ValueError, "_solver: sizes do not fit, or a number out of range");
        return 0;
    }
    call->search = (Search){call->weights.buf, count, order, call->memory};
    for (int64_t p = 0; p < count; p++)
        call->search.place[order[p]] = p;
    return 1;
}

static PyObject *search(PyObject *self, PyObject *args)
{
    Call call;
    Py_buffer limits;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*y*y*", &call.weights, &call.order, &call.pairs, &limits))
        return NULL;
    if (!open_call(&call)) {
        PyBuffer_Release(&limits);
        return NULL;
    }
    int64_t num_rounds = limits.len / (int64_t)sizeof(int64_t);
    int64_t num_swaps = num_rounds > 0 ? call.num_pairs / num_rounds : 0;
    int fits = num_swaps * num_rounds == call.num_pairs;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        iterate(&call.search, call.pairs.buf, num_swaps, limits.buf, num_rounds,
                call.memory + call.search.count);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&limits);
    close_call(&call);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "_solver: no whole number of pairs in a round");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *swap(PyObject *self, PyObject *args)
{
    Call call;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*y*", &call.weights, &call.order, &call.pairs))
        return NULL;
    if (!open_call(&call))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    swap_pairs(&call.search, call.pairs.buf, call.num_pairs);
    Py_END_ALLOW_THREADS
    close_call(&call);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"search", search, METH_VARARGS,
     "search(weights, order, pairs, limits), all int64: see kernels.iterated_search."},
    {"swap", swap, METH_VARARGS, "swap(weights, order, pairs), all int64: see kernels.swap_pairs."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_solver", "Compiled loops of megatron_d3.influence.solvers.kernels.", -1,
    methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__solver(void)
{
    return PyModule_Create(&module);
}
