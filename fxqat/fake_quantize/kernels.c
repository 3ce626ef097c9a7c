/* Fake-quantization of float32 tensors, forward and backward, each in one pass over memory.

   fxqat/fake_quantize/kernels.py calls these functions; straight_through.py tells the formulas and is the reference:
   the forward results have the same bits. Plain C, without headers of torch or Python.

   A tensor is (outer, channels, inner) in memory. It is cut into items, whose sums are added in a fixed order: the
   results do not depend on the number of threads. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 9)
#define VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED
#endif

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

#if defined(__GNUC__) && !defined(_WIN32)
/* The threads of the OpenMP runtime that torch has loaded; without one, the symbols are null. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
#define HAS_THREADS (GOMP_parallel && omp_get_thread_num && omp_get_num_threads)
#else
#define HAS_THREADS 0
#endif

/* Tells a library that was built from another version of this file. */
EXPORTED const uint32_t fxqat_source = FXQAT_SOURCE;

enum { SCALE = 1, ZERO_POINT = 2, FACTOR = 4, USED_SCALE = 8, UNIT_SCALE = 16 }; /* bits of `per_channel` */

enum {
    ITEM = 16384,     /* elements of an item, about */
    FLOAT_SUM = 1024, /* elements that are added in float32, in several lanes; more are added in double */
    GRAIN = 32768,    /* fewer elements are left to one thread, as in torch */
    BELOW = -128,     /* codes of elements outside the range ... */
    ABOVE = 127,
    NOT_A_NUMBER = -127,
    HALF_STEP = 126,  /* ... and the code of half a step, for elements inside */
};

enum { SIZE = 0x7FFFFFFF }; /* of the bit pattern of a float, all but the sign */

static const float EDGE = 0.0078125f; /* numerics.EDGE: up to so many steps beyond the range, an element is inside */

static const float NOTHING = 0x1p-24f; /* fold.NOTHING */

typedef struct {
    const float *x, *grad;
    float *result; /* x_hat or the gradient of x */
    int8_t *codes;
    const float *grid, *offset, *signed_scale; /* (channels,) each */
    double *sums;  /* (items, 2) of rows, (items, 2, channels) of columns */
    int32_t *largest; /* (items,) of rows, (items, channels) of columns */
    int64_t outer, channels, inner;
    int64_t blocks; /* of a row; of columns: rows of an item */
    float quant_min, quant_max;
} Work;

typedef void (*Task)(const Work *, int64_t begin, int64_t end);

typedef struct {
    Task task;
    const Work *work;
    int64_t items;
} Job;

#if defined(__GNUC__) && !defined(_WIN32)
static void take_share(void *data) {
    const Job *job = data;
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    job->task(job->work, job->items * thread / threads, job->items * (thread + 1) / threads);
}
#endif

static void run(Task task, const Work *work, int64_t items, int threads) {
#if defined(__GNUC__) && !defined(_WIN32)
    if (threads > 1 && items > 1 && HAS_THREADS && work->outer * work->channels * work->inner >= GRAIN) {
        Job job = {task, work, items};
        GOMP_parallel(take_share, &job, (unsigned)(threads < items ? threads : items), 0);
        return;
    }
#endif
    task(work, 0, items);
}

/* Channels along the last axis: an item is a few whole rows of channels. Otherwise an item is a piece of one row. */
static int is_columns(const Work *work) { return work->inner == 1 && work->channels > 1; }

static int64_t cut(Work *work) {
    if (is_columns(work)) {
        work->blocks = work->channels < ITEM ? ITEM / work->channels : 1;
        return (work->outer + work->blocks - 1) / work->blocks;
    }
    work->blocks = (work->inner + ITEM - 1) / ITEM;
    return work->outer * work->channels * work->blocks;
}

/* The piece of an item of rows: returns its first element. */
static inline int64_t piece(const Work *work, int64_t item, int64_t *length, int64_t *channel) {
    int64_t row = item / work->blocks, start = item % work->blocks * ITEM;
    *length = work->inner - start < ITEM ? work->inner - start : ITEM;
    *channel = row % work->channels;
    return row * work->inner + start;
}

static inline int32_t pattern_of(float value) {
    int32_t pattern;
    memcpy(&pattern, &value, sizeof pattern);
    return pattern;
}

/* NaN stays NaN, and -0 stays -0, as in torch.clamp. */
static inline float limited(float value, float low, float high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

static inline float code_of(float steps, float error, float quant_min, float quant_max) {
    float code = steps == steps ? rintf(error * (2 * HALF_STEP)) : NOT_A_NUMBER;
    code = steps <= quant_min - EDGE ? BELOW : code;
    return steps >= quant_max + EDGE ? ABOVE : code;
}

VECTORIZED static void forward_rows(const Work *work, int64_t begin, int64_t end) {
    const float quant_min = work->quant_min, quant_max = work->quant_max;
    for (int64_t item = begin; item < end; item++) {
        int64_t length, channel, start = piece(work, item, &length, &channel);
        const float grid = work->grid[channel], offset = work->offset[channel];
        const float low = quant_min - offset, high = quant_max - offset;
        const float *restrict x = work->x + start;
        float *restrict result = work->result + start;
        if (work->codes == NULL) {
            for (int64_t i = 0; i < length; i++) result[i] = limited(rintf(x[i] / grid), low, high) * grid;
            continue;
        }
        int8_t *restrict codes = work->codes + start;
        for (int64_t first = 0; first < length; first += FLOAT_SUM) {
            const int64_t last = first + FLOAT_SUM < length ? first + FLOAT_SUM : length;
            float numbers[FLOAT_SUM];
            for (int64_t i = first; i < last; i++) {
                float q = x[i] / grid, rounded = limited(rintf(q), low, high);
                numbers[i - first] = code_of(q + offset, rounded - q, quant_min, quant_max);
                result[i] = rounded * grid;
            }
            for (int64_t i = first; i < last; i++) codes[i] = (int8_t)(int)numbers[i - first];
        }
    }
}

VECTORIZED static void forward_columns(const Work *work, int64_t begin, int64_t end) {
    const float quant_min = work->quant_min, quant_max = work->quant_max;
    const float *restrict grid = work->grid, *restrict offset = work->offset;
    int64_t channels = work->channels, last = end * work->blocks;
    for (int64_t row = begin * work->blocks; row < last && row < work->outer; row++) {
        const float *restrict x = work->x + row * channels;
        float *restrict result = work->result + row * channels;
        int8_t *restrict codes = work->codes == NULL ? NULL : work->codes + row * channels;
        for (int64_t c = 0; c < channels; c++) {
            float q = x[c] / grid[c], rounded = limited(rintf(q), quant_min - offset[c], quant_max - offset[c]);
            if (codes != NULL) codes[c] = (int8_t)code_of(q + offset[c], rounded - q, quant_min, quant_max);
            result[c] = rounded * grid[c];
        }
    }
}

/* Whether an element of x is outside, and its ratio: (x_hat - x) / grid inside and x_hat / grid outside. */
static inline int of_input(float x, float grid, float offset, float quant_min, float quant_max, float *ratio) {
    float q = x / grid, steps = q + offset;
    float rounded = limited(rintf(q), quant_min - offset, quant_max - offset);
    int outside = (steps <= quant_min - EDGE) | (steps >= quant_max + EDGE);
    *ratio = outside ? rounded + (x - x) : rounded - q; /* NaN if x is infinite: no gradient of the scale */
    return outside;
}

static inline int of_code(float number, float offset, float quant_min, float quant_max, float *ratio) {
    float inside = number == NOT_A_NUMBER ? NAN : number * (0.5f / HALF_STEP);
    float outer = (number < 0.0f ? quant_min : quant_max) - offset;
    int outside = (number == BELOW) | (number == ABOVE);
    *ratio = outside ? outer : inside;
    return outside;
}

/* Two loops over i that differ in how `outside` and `ratio` come about. They write the gradient of x and add up. An
   infinite gradient inside makes NaN of the sum outside, too, so that a bad batch moves neither scale nor zero point. */
#define PASS(FOUND)                                \
    for (int64_t i = first; i < last; i++) {       \
        float ratio;                               \
        int outside = FOUND;                       \
        float passed = outside ? 0.0f : grad[i];   \
        result[i] = passed;                        \
        by_ratio += grad[i] * ratio;               \
        left_out += grad[i] - passed;              \
    }

VECTORIZED static void backward_rows(const Work *work, int64_t begin, int64_t end) {
    const float quant_min = work->quant_min, quant_max = work->quant_max;
    for (int64_t item = begin; item < end; item++) {
        int64_t length, channel, start = piece(work, item, &length, &channel);
        const float grid = work->grid[channel], offset = work->offset[channel];
        const float *restrict grad = work->grad + start;
        float *restrict result = work->result + start;
        double all_by_ratio = 0.0, all_left_out = 0.0;
        for (int64_t first = 0; first < length; first += FLOAT_SUM) {
            const int64_t last = first + FLOAT_SUM < length ? first + FLOAT_SUM : length;
            float by_ratio = 0.0f, left_out = 0.0f;
            if (work->codes == NULL) {
                const float *restrict x = work->x + start;
#pragma omp simd reduction(+ : by_ratio, left_out)
                PASS(of_input(x[i], grid, offset, quant_min, quant_max, &ratio))
            } else {
                float numbers[FLOAT_SUM];
                const int8_t *restrict codes = work->codes + start;
                for (int64_t i = first; i < last; i++) numbers[i - first] = codes[i];
#pragma omp simd reduction(+ : by_ratio, left_out)
                PASS(of_code(numbers[i - first], offset, quant_min, quant_max, &ratio))
            }
            all_by_ratio += (double)by_ratio, all_left_out += (double)left_out;
        }
        work->sums[2 * item] = all_by_ratio;
        work->sums[2 * item + 1] = all_left_out;
    }
}

VECTORIZED static void backward_columns(const Work *work, int64_t begin, int64_t end) {
    const float quant_min = work->quant_min, quant_max = work->quant_max;
    const float *restrict grid = work->grid, *restrict offset = work->offset;
    int64_t channels = work->channels;
    for (int64_t item = begin; item < end; item++) {
        double *restrict by_ratio = work->sums + 2 * channels * item, *restrict left_out = by_ratio + channels;
        for (int64_t c = 0; c < channels; c++) by_ratio[c] = left_out[c] = 0.0;
        int64_t last = (item + 1) * work->blocks;
        for (int64_t row = item * work->blocks; row < last && row < work->outer; row++) {
            const float *restrict grad = work->grad + row * channels;
            const float *restrict x = work->codes == NULL ? work->x + row * channels : NULL;
            const int8_t *restrict codes = work->codes == NULL ? NULL : work->codes + row * channels;
            float *restrict result = work->result + row * channels;
            for (int64_t c = 0; c < channels; c++) {
                float ratio;
                int outside = codes == NULL
                                  ? of_input(x[c], grid[c], offset[c], quant_min, quant_max, &ratio)
                                  : of_code(codes[c], offset[c], quant_min, quant_max, &ratio);
                result[c] = outside ? 0.0f : grad[c];
                by_ratio[c] += (double)grad[c] * (double)ratio;
                left_out[c] += (double)(grad[c] - result[c]);
            }
        }
    }
}

/* numerics.valid_scale */
static float valid_scale(float scale, int bits, int up) {
    static const uint32_t smallest = (127u - 40u) << 23, largest = (127u + 40u) << 23;
    uint32_t unit = 1u << (24 - bits), pattern;
    memcpy(&pattern, &scale, sizeof pattern);
    pattern = (pattern + (up ? unit - 1u : unit >> 1)) & 0x7FFFFFFFu & ~(unit - 1u);
    pattern = pattern < smallest ? smallest : pattern > largest ? largest : pattern;
    memcpy(&scale, &pattern, sizeof scale);
    return scale;
}

static float in_unit(const float *scale, const float *unit, int64_t channel) {
    return unit == NULL ? scale[channel] : scale[channel] * unit[channel];
}

/* numerics.valid_zero_point, with the limits as multiples of the step */
static float valid_zero_point(float value, int quant_min, int quant_max, int step) {
    int low = step == 1 ? quant_min : (int)ceil((double)quant_min / step);
    int high = step == 1 ? quant_max : (int)floor((double)quant_max / step);
    value = isnan(value) ? (float)quant_min : value;
    if (step == 1) return limited(rintf(value), (float)low, (float)high);
    return limited(rintf(value / (float)step), (float)low, (float)high) * (float)step;
}

/* Rounds x to `result`.

   Of scale, zero_point, factor, used_scale and unit_scale, the last four may be null. They have one element, or one per
   channel if their bit of `per_channel` is set. `table` (3, channels) receives, for the backward pass, the grid, the zero
   point in use, and the scale in use, divided by unit_scale, with the sign of `scale`. `codes`, unless null, receives
   what the backward pass needs to know of x. */
EXPORTED void fxqat_forward(const float *x, float *result, int8_t *codes, float *table, const float *scale,
                            const float *zero_point, const float *factor, const float *used_scale,
                            const float *unit_scale, int64_t outer, int64_t channels, int64_t inner, int per_channel,
                            int quant_min, int quant_max, int zero_point_step, int scale_bits, int threads) {
    Work work = {.x = x, .result = result, .codes = codes, .quant_min = (float)quant_min, .quant_max = (float)quant_max};
    work.outer = outer, work.channels = channels, work.inner = inner;
    float *grid = table, *offset = table + channels, *learned = table + 2 * channels;
    work.grid = grid, work.offset = offset;
    for (int64_t c = 0; c < channels; c++) {
        float unit = unit_scale == NULL ? 1.0f : unit_scale[per_channel & UNIT_SCALE ? c : 0];
        float own = scale[per_channel & SCALE ? c : 0] * unit;
        float used = used_scale == NULL ? valid_scale(own, scale_bits, 0) : used_scale[per_channel & USED_SCALE ? c : 0];
        grid[c] = factor == NULL ? used : used / factor[per_channel & FACTOR ? c : 0];
        offset[c] = 0.0f;
        if (zero_point != NULL) {
            float value = zero_point[per_channel & ZERO_POINT ? c : 0];
            offset[c] = valid_zero_point(value, quant_min, quant_max, zero_point_step);
        }
        learned[c] = copysignf(used, own) / unit;
    }
    int64_t items = cut(&work);
    run(is_columns(&work) ? forward_columns : forward_rows, &work, items, threads);
}

/* Rounds x to `result` once more, by the table of the first time. */
EXPORTED void fxqat_forward_again(const float *x, float *result, const float *table, int64_t outer, int64_t channels,
                                  int64_t inner, int quant_min, int quant_max, int threads) {
    Work work = {.x = x, .result = result, .quant_min = (float)quant_min, .quant_max = (float)quant_max};
    work.outer = outer, work.channels = channels, work.inner = inner;
    work.grid = table, work.offset = table + channels;
    int64_t items = cut(&work);
    run(is_columns(&work) ? forward_columns : forward_rows, &work, items, threads);
}

/* nn/fold.py, grid_factor: gamma / sqrt(variance + eps), or the largest one where that is nothing beside it. `gamma` may
   be null. */
EXPORTED void fxqat_bn_factor(const float *variance, const float *gamma, float *factor, int64_t channels, float eps) {
    float largest = 0.0f;
    for (int64_t c = 0; c < channels; c++) {
        factor[c] = 1.0f / sqrtf(variance[c] + eps) * (gamma == NULL ? 1.0f : gamma[c]);
        float size = fabsf(factor[c]);
        if (size > largest && isfinite(size)) largest = size;
    }
    largest = largest > 0.0f ? largest : 1.0f;
    for (int64_t c = 0; c < channels; c++) {
        if (fabsf(factor[c]) <= largest * NOTHING) factor[c] = largest;
    }
}

/* The largest absolute value of every item; of columns, of every channel in it. The bit patterns are compared: NaN is
   larger than infinity. */
VECTORIZED static void largest_of_rows(const Work *work, int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
        int64_t length, channel, start = piece(work, item, &length, &channel);
        const float *restrict x = work->x + start;
        int32_t largest = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < length; i++) {
            int32_t pattern = pattern_of(x[i]) & SIZE;
            largest = pattern > largest ? pattern : largest;
        }
        work->largest[item] = largest;
    }
}

VECTORIZED static void largest_of_columns(const Work *work, int64_t begin, int64_t end) {
    const int64_t channels = work->channels;
    for (int64_t item = begin; item < end; item++) {
        int32_t *restrict largest = work->largest + channels * item;
        memset(largest, 0, sizeof(int32_t) * (size_t)channels);
        int64_t last = (item + 1) * work->blocks;
        for (int64_t row = item * work->blocks; row < last && row < work->outer; row++) {
            const float *restrict x = work->x + row * channels;
            for (int64_t c = 0; c < channels; c++) {
                int32_t pattern = pattern_of(x[c]) & SIZE;
                largest[c] = pattern > largest[c] ? pattern : largest[c];
            }
        }
    }
}

static float largest_of_channel(const Work *work, int64_t items, int64_t channel) {
    int32_t largest = 0;
    for (int64_t row = 0; row < (is_columns(work) ? items : work->outer); row++) {
        const int64_t count = is_columns(work) ? 1 : work->blocks;
        const int32_t *found = work->largest + (row * work->channels + channel) * count;
        for (int64_t i = 0; i < count; i++) largest = found[i] > largest ? found[i] : largest;
    }
    float value;
    memcpy(&value, &largest, sizeof value);
    return value;
}

/* Of what is finite: the ratio to the magnitude before, or 1 where that is 0; and the new one. */
static void grow(float value, float smallest, float *magnitude, float *ratio) {
    value = value < smallest ? smallest : value;
    value = isfinite(value) ? value : *magnitude;
    *ratio = *magnitude > 0.0f ? value / *magnitude : 1.0f;
    *magnitude = value;
}

/* Replaces `magnitude` by the largest absolute value of x * factor, but at least `smallest`, and writes the ratio to the
   one before; see following.py. Both have one element, or one per channel. `factor`, unless null, has one per channel.
   Returns 0, or 1 if there is no memory. */
EXPORTED int fxqat_growth(const float *x, const float *factor, float *magnitude, float *ratio, int64_t outer,
                          int64_t channels, int64_t inner, int per_channel, float smallest, int threads) {
    Work work = {.x = x, .outer = outer, .channels = channels, .inner = inner};
    int64_t items = cut(&work);
    work.largest = malloc(sizeof(int32_t) * (size_t)(is_columns(&work) ? items * channels : items));
    if (work.largest == NULL) return 1;
    run(is_columns(&work) ? largest_of_columns : largest_of_rows, &work, items, threads);
    float shared = 0.0f;
    for (int64_t c = 0; c < channels; c++) {
        float value = largest_of_channel(&work, items, c);
        value = factor == NULL ? value : value * fabsf(factor[c]);
        if (per_channel) {
            grow(value, smallest, magnitude + c, ratio + c);
        } else if (value > shared || isnan(value)) {
            shared = value;
        }
    }
    if (!per_channel) grow(shared, smallest, magnitude, ratio);
    free(work.largest);
    return 0;
}

/* Of a layer with a bias: the weight scale in use, raised where the bias would not fit into int32, and what the rounding
   of the bias adds to it; see fxqat/nn/bias.py. `weight_scale`, `weight_unit` and `used_scale` have one element, or one
   per channel. The units multiply the scales, unless null. */
EXPORTED void fxqat_round_bias(const float *bias, const float *input_scale, const float *weight_scale,
                               const float *input_unit, const float *weight_unit, float *used_scale, float *error,
                               int64_t channels, int per_channel, int input_bits, int weight_bits, float bias_limit,
                               float int32_limit) {
    float input = valid_scale(in_unit(input_scale, input_unit, 0), input_bits, 0), shared_floor = 0.0f, shared = 0.0f;
    for (int64_t c = 0; c < channels; c++) {
        float floor_of_channel = fabsf(bias[c]) * (1.0f / bias_limit) / input;
        if (per_channel) {
            float own = valid_scale(in_unit(weight_scale, weight_unit, c), weight_bits, 0);
            float raised = valid_scale(floor_of_channel, 1, 1);
            used_scale[c] = own > raised ? own : raised;
        } else if (floor_of_channel > shared_floor || isnan(floor_of_channel)) {
            shared_floor = floor_of_channel;
        }
    }
    if (!per_channel) {
        float own = valid_scale(in_unit(weight_scale, weight_unit, 0), weight_bits, 0);
        float raised = valid_scale(shared_floor, 1, 1);
        *used_scale = shared = own > raised ? own : raised;
    }
    for (int64_t c = 0; c < channels; c++) {
        float grid = input * (per_channel ? used_scale[c] : shared);
        error[c] = limited(rintf(bias[c] / grid), -int32_limit, int32_limit) * grid - bias[c];
    }
}

/* Adds the sums of the items of every channel, in their order. */
static void total(const Work *work, int64_t items, int64_t channel, double *by_ratio, double *left_out) {
    *by_ratio = *left_out = 0.0;
    if (is_columns(work)) {
        for (int64_t item = 0; item < items; item++) {
            const double *sums = work->sums + 2 * work->channels * item + channel;
            *by_ratio += sums[0], *left_out += sums[work->channels];
        }
        return;
    }
    for (int64_t outer = 0; outer < work->outer; outer++) {
        const double *sums = work->sums + 2 * work->blocks * (outer * work->channels + channel);
        for (int64_t block = 0; block < work->blocks; block++) {
            *by_ratio += sums[2 * block], *left_out += sums[2 * block + 1];
        }
    }
}

/* The float of a gradient, 0 if that is not finite. */
static float finite_or_zero(double value) {
    float single = (float)value;
    return isfinite(single) ? single : 0.0f;
}

/* The gradients of x, and, unless null, those of scale and zero_point, times `multiplier`.

   Either `x` or `codes` is given. Returns 0, or 1 if there is no memory. */
EXPORTED int fxqat_backward(const float *x, const int8_t *codes, const float *grad, float *grad_x, float *grad_scale,
                            float *grad_zero_point, const float *table, int64_t outer, int64_t channels, int64_t inner,
                            int per_channel, int quant_min, int quant_max, double multiplier, int threads) {
    Work work = {.x = x, .grad = grad, .result = grad_x, .codes = (int8_t *)codes};
    work.quant_min = (float)quant_min, work.quant_max = (float)quant_max;
    work.outer = outer, work.channels = channels, work.inner = inner;
    work.grid = table, work.offset = table + channels;
    const float *learned = table + 2 * channels;
    int64_t items = cut(&work);
    work.sums = malloc(sizeof(double) * 2 * (size_t)(is_columns(&work) ? items * channels : items));
    if (work.sums == NULL) return 1;
    run(is_columns(&work) ? backward_columns : backward_rows, &work, items, threads);
    double of_scale = 0.0, of_zero_point = 0.0;
    for (int64_t c = 0; c < channels; c++) {
        double by_ratio, left_out;
        total(&work, items, c, &by_ratio, &left_out);
        by_ratio *= (double)work.grid[c] / (double)learned[c] * multiplier;
        left_out *= -(double)work.grid[c] * multiplier;
        of_scale += by_ratio, of_zero_point += left_out;
        if (grad_scale != NULL && per_channel & SCALE) grad_scale[c] = finite_or_zero(by_ratio);
        if (grad_zero_point != NULL && per_channel & ZERO_POINT) grad_zero_point[c] = finite_or_zero(left_out);
    }
    if (grad_scale != NULL && !(per_channel & SCALE)) *grad_scale = finite_or_zero(of_scale);
    if (grad_zero_point != NULL && !(per_channel & ZERO_POINT)) *grad_zero_point = finite_or_zero(of_zero_point);
    free(work.sums);
    return 0;
}
