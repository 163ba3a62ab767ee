/* The loops of _sketch.c for one type of number. Included once for each, with
 *
 *   VALUE  what a tensor holds      LOAD(x)  that as a REAL
 *   REAL   float or double          WORD  the unsigned integer of its size      SIGN  its sign bit
 *   FLIP(x, bits)  x with its sign flipped where the sign bit of `bits` is set
 *   KERNEL(name)   the name of a function for this type
 *
 * Sums of up to FLUSH numbers (FEW of the dense sketch) are kept in REAL, the sums of these in double.
 */

/* sum[j] += x[j], or -x[j] where the bit of global offset p + j is set. */
INLINE void KERNEL(add_run)(REAL *restrict sum, const VALUE *restrict x, int64_t count,
                            uint64_t p, uint64_t key)
{
    uint64_t number = p >> 6, shift = p & 63, word = hash64(number, key);
    for (int64_t start = 0; start < count; start += 64) {
        uint64_t next = hash64(++number, key);
        /* the bits of 64 elements from p + start on; a shift by 64 is undefined, hence two */
        uint64_t bits = (word >> shift) | ((next << 1) << (63 - shift));
        word = next;
        REAL *restrict to = sum + start;
        const VALUE *restrict from = x + start;
        if (count - start >= 64)
            for (int half = 0; half < 2; half++, bits >>= 32, to += 32, from += 32)
                for (int j = 0; j < 32; j++)
                    to[j] += FLIP(LOAD(from[j]), (WORD)(uint32_t)bits << (SIGN - j));
        else
            for (int j = 0; j < (int)(count - start); j++)
                to[j] += FLIP(LOAD(from[j]), (WORD)(bits >> j) << SIGN);
    }
}

/* The same, first up to a multiple of 64 bytes, so that no store of the rest crosses a cache line. */
INLINE void KERNEL(add_signed)(REAL *restrict sum, const VALUE *restrict x, int64_t count,
                               uint64_t p, uint64_t key)
{
    int64_t lead = (int64_t)(-((uintptr_t)sum / sizeof(REAL)) % (64 / sizeof(REAL)));
    lead = lead < count ? lead : count;
    if (lead > 0)
        KERNEL(add_run)(sum, x, lead, p, key);
    KERNEL(add_run)(sum + lead, x + lead, count - lead, p + (uint64_t)lead, key);
}

static void KERNEL(flush)(REAL *restrict sum, double *restrict out, int64_t dim)
{
    for (int64_t j = 0; j < dim; j++) {
        out[j] += (double)sum[j];
        sum[j] = 0;
    }
}

CLONES static void KERNEL(rotation)(const VALUE *x, const Shard *shard, const Map *map, REAL *sum,
                                    double *out)
{
    int64_t dim = map->dim, fresh = 0;
    for (int64_t run = 0; run < shard->num_runs; run++) {
        const VALUE *from = x + shard->local_start + run * shard->local_stride;
        int64_t p = shard->global_start + run * shard->global_stride;
        int64_t stop = p + shard->run_length, block = p / dim, index = p - block * dim;
        while (p < stop) {
            int64_t bucket = index + hash_below(hash64((uint64_t)block, map->keys[0]), dim);
            bucket -= bucket >= dim ? dim : 0;
            int64_t count = dim - index < stop - p ? dim - index : stop - p;
            int64_t first = dim - bucket < count ? dim - bucket : count; /* up to the wrap */
            KERNEL(add_signed)(sum + bucket, from, first, (uint64_t)p, map->keys[1]);
            if (first < count)
                KERNEL(add_signed)(sum, from + first, count - first, (uint64_t)(p + first),
                                   map->keys[1]);
            p += count;
            from += count;
            fresh += count;
            index = 0;
            block++;
            if (fresh >= FLUSH * dim) {
                KERNEL(flush)(sum, out, dim);
                fresh = 0;
            }
        }
    }
    KERNEL(flush)(sum, out, dim);
}

CLONES static void KERNEL(count)(const VALUE *x, const Shard *shard, const Map *map, REAL *sum,
                                 double *out)
{
    int64_t dim = map->dim;
    (void)sum;
    for (int64_t run = 0; run < shard->num_runs; run++) {
        const VALUE *from = x + shard->local_start + run * shard->local_stride;
        int64_t p = shard->global_start + run * shard->global_stride;
        for (int64_t start = 0; start < shard->run_length; start += 64) {
            uint64_t words[64];
            int64_t rest = shard->run_length - start;
            for (int j = 0; j < 64; j++)
                words[j] = hash64((uint64_t)(p + start + j), map->keys[0]);
            for (int j = 0; j < (rest < 64 ? (int)rest : 64); j++)
                out[hash_below(words[j], dim)] +=
                    (double)FLIP(LOAD(from[start + j]), (WORD)(words[j] & 1) << SIGN);
        }
    }
}

/* sum (2 * half) holds the rows of the cosines, then those of the sines. */
CLONES static void KERNEL(gaussian)(const VALUE *x, const Shard *shard, const Map *map, REAL *sum,
                                    double *out)
{
    int64_t half = (map->dim + 1) / 2, fresh = 0;
    for (int64_t run = 0; run < shard->num_runs; run++) {
        const VALUE *from = x + shard->local_start + run * shard->local_stride;
        int64_t p = shard->global_start + run * shard->global_stride;
        for (int64_t i = 0; i < shard->run_length; i++) {
            REAL value = LOAD(from[i]);
            if (value == 0) /* as padding and unused embeddings have it */
                continue;
            uint64_t key = hash64((uint64_t)(p + i), map->keys[0]);
            for (int64_t row = 0; row < half; row += 64) {
                float cosine[64], sine[64];
                normals((uint64_t)row, key, cosine, sine);
                int rest = half - row < 64 ? (int)(half - row) : 64;
                for (int j = 0; j < rest; j++)
                    sum[row + j] += value * (REAL)cosine[j];
                for (int j = 0; j < rest; j++)
                    sum[half + row + j] += value * (REAL)sine[j];
            }
            if (++fresh == FEW) {
                KERNEL(flush)(sum, out, map->dim);
                fresh = 0;
            }
        }
    }
    KERNEL(flush)(sum, out, map->dim);
    double scale = 1 / sqrt((double)map->dim);
    for (int64_t j = 0; j < map->dim; j++)
        out[j] *= scale;
}
