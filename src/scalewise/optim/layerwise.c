/* LARS and LAMB on a CPU: the norms of a layer, then its update, while the layer is in the cache.

   Compiled by native.py when an optimizer takes its first step, with REAL as float or double. */

#include <tgmath.h>

#define LANES 32 /* sums side by side: vector instructions, in an order that the source fixes */
#define BLOCK 4096

static double total(const REAL *lanes) {
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

/* Adds Σx² and Σy² to what is there. */
static void add_squares(const REAL *restrict x, const REAL *restrict y, long size, double *of_x, double *of_y) {
    for (long start = 0; start < size; start += BLOCK) {
        long stop = start + BLOCK < size ? start + BLOCK : size, i = start;
        REAL sums_x[LANES] = {0}, sums_y[LANES] = {0};
        for (; i + LANES <= stop; i += LANES) {
            for (int lane = 0; lane < LANES; lane++) sums_x[lane] += x[i + lane] * x[i + lane];
            for (int lane = 0; lane < LANES; lane++) sums_y[lane] += y[i + lane] * y[i + lane];
        }
        for (int lane = 0; i < stop; i++, lane++) {
            sums_x[lane] += x[i] * x[i];
            sums_y[lane] += y[i] * y[i];
        }
        *of_x += total(sums_x);
        *of_y += total(sums_y);
    }
}

/* Where the last block before `stop` begins. Updates go through a layer from its end to its start: of a layer that is
   larger than the cache, the norms' pass has left the end there. */
static long last_block(long stop) { return (stop - 1) / BLOCK * BLOCK; }

/* rate = trust·‖w‖ ÷ (‖g‖ + decay·‖w‖);  v ← momentum·v + rate·(g + decay·w);  w ← w − lr·v */
void lars(long layers, REAL **all_weights, REAL **all_gradients, REAL **all_buffers, const long *sizes,
          const double *decays, double lr, double momentum, double trust) {
    for (long layer = 0; layer < layers; layer++) {
        REAL *restrict weights = all_weights[layer], *restrict buffer = all_buffers[layer];
        const REAL *restrict gradients = all_gradients[layer];
        double of_weights = 0, of_gradients = 0;
        add_squares(weights, gradients, sizes[layer], &of_weights, &of_gradients);
        double length = sqrt(of_weights), slope = sqrt(of_gradients);
        const REAL rate = length && slope ? trust * length / (slope + decays[layer] * length) : 1;
        const REAL decay = decays[layer], keep = momentum, step = lr;
        for (long stop = sizes[layer], start; stop > 0; stop = start) {
            start = last_block(stop);
            for (long i = start; i < stop; i++) {
                buffer[i] = keep * buffer[i] + rate * (gradients[i] + decay * weights[i]);
                weights[i] -= step * buffer[i];
            }
        }
    }
}

/* r = m ÷ bias₁ ÷ (√v ÷ bias₂ + ε);  u = r + decay·w;  w ← w − lr · min(‖w‖ ÷ ‖u‖, largest) · u

   with Adam's moments m and v, and bias₁ = 1 − β₁ᵗ, bias₂ = √(1 − β₂ᵗ). u is computed twice rather than stored: that moves
   less memory. */
void lamb(long layers, REAL **all_weights, REAL **all_gradients, REAL **all_means, REAL **all_squares,
          const long *sizes, const double *decays, const double *first_biases, const double *second_biases, double lr,
          double beta1, double beta2, double epsilon, double largest) {
    const REAL fresh1 = 1 - beta1, keep2 = beta2, fresh2 = 1 - beta2, small = epsilon;
    for (long layer = 0; layer < layers; layer++) {
        REAL *restrict weights = all_weights[layer], *restrict means = all_means[layer];
        REAL *restrict squares = all_squares[layer];
        const REAL *restrict gradients = all_gradients[layer];
        const REAL decay = decays[layer], scale = 1 / first_biases[layer], root_scale = 1 / second_biases[layer];
        const long size = sizes[layer];
        double of_weights = 0, of_updates = 0;
        for (long start = 0; start < size; start += BLOCK) {
            REAL updates[BLOCK];
            long count = start + BLOCK < size ? BLOCK : size - start;
            for (long i = 0; i < count; i++) {
                const REAL gradient = gradients[start + i];
                const REAL mean = means[start + i] + fresh1 * (gradient - means[start + i]);
                const REAL square = keep2 * squares[start + i] + fresh2 * gradient * gradient;
                means[start + i] = mean;
                squares[start + i] = square;
                updates[i] = mean * scale / (sqrt(square) * root_scale + small) + decay * weights[start + i];
            }
            add_squares(weights + start, updates, count, &of_weights, &of_updates);
        }
        double ratio = of_weights && of_updates ? sqrt(of_weights) / sqrt(of_updates) : 1;
        const REAL step = lr * (ratio > largest ? largest : ratio);
        for (long stop = size, start; stop > 0; stop = start) {
            start = last_block(stop);
            for (long i = start; i < stop; i++)
                weights[i] -= step * (means[i] * scale / (sqrt(squares[i]) * root_scale + small) + decay * weights[i]);
        }
    }
}
