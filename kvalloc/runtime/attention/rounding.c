/* Rounding of keys whose later channels make up for the rounding of a channel, on the CPU.

   Called by kvalloc/runtime/key_rounding.py, whose torch operations do the same elsewhere. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 64 /* keys that share a scale and a minimum in each channel */

typedef struct {
    float least, most, step, levels;
} range;

static range range_of(const float *channel, float levels) {
    range of = {FLT_MAX, -FLT_MAX, 0.0f, levels};
    for (int t = 0; t < BLOCK; t++) {
        of.least = channel[t] < of.least ? channel[t] : of.least;
        of.most = channel[t] > of.most ? channel[t] : of.most;
    }
    of.step = (of.most - of.least) / levels;
    return of;
}

/* Round a channel of a block in place, and write what each key has lost to `lost`. */
static void round_channel(float *channel, const float *exact, range of, float *lost) {
    float divisor = of.step > 0.0f ? of.step : INFINITY;
    for (int t = 0; t < BLOCK; t++) {
        float code = rintf((channel[t] - of.least) / divisor);
        code = code < 0.0f ? 0.0f : code > of.levels ? of.levels : code;
        float back = code * of.step + of.least;
        /* the ends of the range stay, so that storing these keys changes them no more */
        back = exact[t] == of.least || exact[t] == of.most ? exact[t] : back;
        lost[t] = channel[t] - back;
        channel[t] = back;
    }
}

/* Round blocks (n_blocks, BLOCK, dim) in place. Of a block's segment, `order` (n_segments, dim)
   has the channels as they are rounded, and `passed` (n_segments, dim, dim), in this order, which
   part of what a channel loses each later one makes up for. A block has the largest code `levels`
   (n_blocks,). Returns 0, or 1 if there is no memory to work with. */
int round_keys(float *blocks, const float *levels, const int64_t *segments, const int64_t *order,
               const float *passed, int64_t n_blocks, int64_t dim) {
    float *exact = malloc(sizeof(float) * 2 * dim * BLOCK), lost[BLOCK];
    if (!exact) return 1;
    float *rest = exact + dim * BLOCK; /* (dim, BLOCK) in order, as far as it is made up for */
    for (int64_t b = 0; b < n_blocks; b++) {
        float *block = blocks + b * BLOCK * dim;
        const int64_t *channels = order + segments[b] * dim;
        for (int64_t d = 0; d < dim; d++)
            for (int t = 0; t < BLOCK; t++) exact[d * BLOCK + t] = block[t * dim + channels[d]];
        memcpy(rest, exact, sizeof(float) * dim * BLOCK);
        for (int64_t d = 0; d < dim; d++) {
            const float *shares = passed + (segments[b] * dim + d) * dim;
            range of = range_of(exact + d * BLOCK, levels[b]);
            round_channel(rest + d * BLOCK, exact + d * BLOCK, of, lost);
            for (int64_t later = d + 1; later < dim; later++)
                for (int t = 0; t < BLOCK; t++) rest[later * BLOCK + t] -= shares[later] * lost[t];
        }
        for (int64_t d = 0; d < dim; d++)
            for (int t = 0; t < BLOCK; t++) block[t * dim + channels[d]] = rest[d * BLOCK + t];
    }
    free(exact);
    return 0;
}
