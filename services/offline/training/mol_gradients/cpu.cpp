// The sampled softmax over mixture-of-logits scores of positions with their group's negatives, and all its gradients: the
// inner loop of training, one pass.
//
// A position's cosines, network and scores are computed block by block while they are in the first cache, then its loss.
// Of its negatives, those that are to have a gradient are gathered into a band with other positions' and computed again
// from the cosines on, with what their gradients need: nothing of size R K G is ever stored. Pairs lie along the lanes,
// components and hidden units along the rows, so every product of matrices broadcasts a scalar of one factor and the
// softmax over components is a few vector operations. Threads take groups; what a group adds to items is added in the
// groups' order, and each thread's sums of weights in the threads': the same threads give the same bits.
//
// Letters: N positions, R positions per group, K negatives per group, K' = K rounded up to whole vectors, M items, P_q, P_x
// components, P = P_q P_x, d component width, d' rounded up, G hidden width of the pair network, W = floats in a row of a
// band.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "parallel.hpp"
#include "vector.hpp"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

extern "C" {

struct Batch {
    int64_t num_positions, group_size, num_negatives, num_query, num_item, width, num_hidden;
    const float* positive;                 // (N,) similarities with the target
    const float *query, *query_gate;       // (N, P_q, d), (N, P)
    const float *items, *item_gate;        // (M, P_x, d), (M, P)
    const float *hidden_weight, *hidden_bias, *out_weight, *out_bias;  // (G, P), (G,), (P, G), (P,)
    const int64_t *rows, *targets;         // (groups, K), (N,): rows of items
    const float* uniforms;                 // (N,) in [0, 1): where systematic sampling begins
    int64_t backward_negatives;            // 0: all
    float tau, correction, gate_dropout, pair_dropout;
    uint64_t seed;
    int64_t threads;
};

struct Gradients {
    float *positive, *query, *query_gate, *items, *item_gate, *hidden_weight, *hidden_bias, *out_weight, *out_bias;
};

}  // extern "C"

namespace {

using namespace freshet;

using Words = uint32_t __attribute__((vector_size(4 * kLanes)));

#ifdef __AVX512F__
constexpr int kColumns = 4;  // times 4 rows: 16 of 32 registers hold sums
#else
constexpr int kColumns = 2;
#endif
constexpr int64_t kBlock = 64;      // columns whose hidden units (G = 64: 16 KB) are in the first cache
constexpr int64_t kBand = 128;      // columns of a backward band
constexpr int64_t kPositions = 8;   // whose cosines are computed together, so that items are read from the cache
constexpr float kNone = -3e38f;     // the logit of what does not count

int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Floats that begin on a cache line and stay from call to call: fresh memory would cost a page fault every 4 KB.
class Buffer {
  public:
    float* of(int64_t size) {
        if (static_cast<int64_t>(lines_.size()) * 16 < size + 16) lines_.resize(size / 16 + 2);
        return lines_.front().values;
    }

  private:
    struct alignas(64) Line {
        float values[16];
    };
    std::vector<Line> lines_;
};

// A factor whose elements are broadcast: element (m, k) at data[m * row + k * column].
struct Scalars {
    const float* data;
    int64_t row, column;
};

template <int M, int N, typename Start, typename End>
[[gnu::always_inline]] inline void product_tile(int64_t row, int64_t at, Scalars a, const float* b, int64_t b_row, int64_t depth,
                                                const Start& start, const End& end) {
    Floats sums[M][N];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[m][n] = start(row + m, at + n * kLanes);
    const float* const scalars = a.data + row * a.row;
    for (int64_t k = 0; k < depth; ++k) {
        Floats column[N];
        for (int n = 0; n < N; ++n) column[n] = load(b + k * b_row + at + n * kLanes);
        for (int m = 0; m < M; ++m) {
            const float scalar = scalars[m * a.row + k * a.column];
            for (int n = 0; n < N; ++n) sums[m][n] += scalar * column[n];
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) end(row + m, at + n * kLanes, sums[m][n]);
}

// end(m, n, start(m, n) + (a b)(m, n)) for every vector n of every row m: a (rows, depth), b (depth, width).
template <typename Start, typename End>
void product(int64_t rows, int64_t width, Scalars a, const float* b, int64_t b_row, int64_t depth, const Start& start,
             const End& end) {
    for (int64_t n = 0; n < width;) {
        const bool wide = width - n >= kColumns * kLanes;
        for (int64_t m = 0; m < rows;) {
            const bool tall = rows - m >= 4;
            if (tall && wide) product_tile<4, kColumns>(m, n, a, b, b_row, depth, start, end);
            else if (tall) product_tile<4, 1>(m, n, a, b, b_row, depth, start, end);
            else if (wide) product_tile<1, kColumns>(m, n, a, b, b_row, depth, start, end);
            else product_tile<1, 1>(m, n, a, b, b_row, depth, start, end);
            m += tall ? 4 : 1;
        }
        n += wide ? kColumns * kLanes : kLanes;
    }
}

const auto zero = [](int64_t, int64_t) { return Floats{}; };

template <int M, int N>
void add_inner_tile(float* sums, int64_t sums_row, const float* x, const float* y, int64_t row, int64_t width) {
    Floats held[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) held[m][n] = load(sums + m * sums_row + n * kLanes);
    for (int64_t at = 0; at < width; at += kLanes) {
        Floats factor[N];
        for (int n = 0; n < N; ++n) factor[n] = load(y + n * row + at);
        for (int m = 0; m < M; ++m) {
            const Floats value = load(x + m * row + at);
            for (int n = 0; n < N; ++n) held[m][n] += value * factor[n];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(sums + m * sums_row + n * kLanes, held[m][n]);
}

// sums (rows, columns), a vector of partial sums each, += x (rows, width) y (columns, width)^T, lane by lane; `row` floats
// from a row of x or y to the next.
void add_inner(float* sums, int64_t rows, int64_t columns, const float* x, const float* y, int64_t row, int64_t width) {
    for (int64_t n = 0; n < columns;) {
        const bool wide = columns - n >= kColumns;
        for (int64_t m = 0; m < rows;) {
            const bool tall = rows - m >= 4;
            float* const to = sums + (m * columns + n) * kLanes;
            const int64_t to_row = columns * kLanes;
            const float *const left = x + m * row, *const right = y + n * row;
            if (tall && wide) add_inner_tile<4, kColumns>(to, to_row, left, right, row, width);
            else if (tall) add_inner_tile<4, 1>(to, to_row, left, right, row, width);
            else if (wide) add_inner_tile<1, kColumns>(to, to_row, left, right, row, width);
            else add_inner_tile<1, 1>(to, to_row, left, right, row, width);
            m += tall ? 4 : 1;
        }
        n += wide ? kColumns : 1;
    }
}

// Of one position's component queries M and vectors N: d_query += a item rows, and the item rows' sums += a^T query. a
// (M, count), item row k at chosen[k] * stride of items and of sums; queries d' apart.
template <int M, int N>
void to_components(Scalars a, const int32_t* chosen, int64_t count, const float* items, float* sums, int64_t stride,
                   const float* query, float* d_query, int64_t wide) {
    Floats held[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) held[m][n] = load(d_query + m * wide + n * kLanes);
    for (int64_t k = 0; k < count; ++k) {
        const float* const from = items + chosen[k] * stride;
        Floats row[N];
        for (int n = 0; n < N; ++n) row[n] = load(from + n * kLanes);
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) held[m][n] += a.data[m * a.row + k] * row[n];
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(d_query + m * wide + n * kLanes, held[m][n]);
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) held[m][n] = load(query + m * wide + n * kLanes);
    for (int64_t k = 0; k < count; ++k) {
        float* const to = sums + chosen[k] * stride;
        Floats row[N];
        for (int n = 0; n < N; ++n) row[n] = load(to + n * kLanes);
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) row[n] += a.data[m * a.row + k] * held[m][n];
        for (int n = 0; n < N; ++n) store(to + n * kLanes, row[n]);
    }
}

float sum_of(Floats values) {
    float lanes[kLanes];
    std::memcpy(lanes, &values, sizeof lanes);
    for (int half = kLanes / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

float highest_of(Floats values) {
    float highest = values[0];
    for (int lane = 1; lane < kLanes; ++lane) highest = std::max(highest, static_cast<float>(values[lane]));
    return highest;
}

// While it lives, this thread takes denormal numbers for zero: gradients through a weight that is almost zero are, and
// each would cost a hundred cycles.
class WithoutDenormals {
  public:
#ifdef __SSE__
    WithoutDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~WithoutDenormals() { _mm_setcsr(before_); }

  private:
    unsigned before_;
#endif
};

// 1 / (1 - probability) or 0 per lane: a counter-based draw, equal for equal (seed, counter + negative), so that the
// backward pass draws what the forward pass drew. `negatives`: kLanes of them.
Floats kept(uint64_t seed, uint32_t counter, const int32_t* negatives, float probability) {
    Words x;
    std::memcpy(&x, negatives, sizeof x);
    x += counter;
    for (const uint32_t key : {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}) {
        x ^= key;
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        x ^= x >> 16;
    }
    const Floats uniform = __builtin_convertvector(x >> 8, Floats) * 0x1p-24f;
    return uniform >= splat(probability) ? splat(1.0f / (1.0f - probability)) : splat(0.0f);
}

// A position's negatives in a band: `count` columns, whole vectors, from column `begin` on.
struct Part {
    int64_t position, begin, count;
};

// Columns of pairs: matrices of P rows (`scores` of one), `row` floats apart.
struct Columns {
    int64_t row;
    float *cosines, *kept, *read, *item_gates, *gates, *gate_slopes, *weights, *scores;
};

// A thread's memory.
struct Space {
    Buffer items, item_gates, item_rows, item_sums, gate_sums, weight_sums;
    Buffer cosines, kept, read, gates, weights, scores, block;
    Buffer band[7], band_scores, query_gates, d_scores, hidden, slopes, change, query, d_query;
    std::vector<int32_t> numbers, chosen, negatives;
    std::vector<float> values;
    std::vector<Part> parts;
};

class Worker {
  public:
    Worker(const Batch& batch, const Gradients& out, Space& space)
        : b_(batch),
          out_(out),
          pairs_(batch.num_query * batch.num_item),
          padded_(whole_vectors(batch.num_negatives)),
          wide_(whole_vectors(batch.width)),
          stride_(batch.num_item * wide_),
          room_(std::max(kBand, padded_)),
          drops_pairs_(batch.pair_dropout > 0),
          space_(space) {
        const int64_t hidden = b_.num_hidden;
        items_ = space.items.of(b_.num_item * b_.width * padded_);
        item_gates_ = space.item_gates.of(pairs_ * padded_);
        item_rows_ = space.item_rows.of(b_.num_negatives * stride_);
        item_sums_ = space.item_sums.of(b_.num_negatives * stride_);
        gate_sums_ = space.gate_sums.of(b_.num_negatives * pairs_);
        float* const sums = space.weight_sums.of((hidden + pairs_ + 2 * hidden * pairs_) * kLanes);
        std::fill_n(sums, (hidden + pairs_ + 2 * hidden * pairs_) * kLanes, 0.0f);
        hidden_weight_ = sums;
        out_weight_ = hidden_weight_ + hidden * pairs_ * kLanes;
        hidden_bias_ = out_weight_ + hidden * pairs_ * kLanes;
        out_bias_ = hidden_bias_ + hidden * kLanes;
        cosines_ = space.cosines.of(kPositions * pairs_ * padded_);
        const auto optional = [&](Buffer& buffer, int64_t row) { return drops_pairs_ ? buffer.of(pairs_ * row) : nullptr; };
        all_ = {padded_, nullptr, optional(space.kept, padded_), optional(space.read, padded_), item_gates_,
                space.gates.of(pairs_ * padded_), nullptr, space.weights.of(pairs_ * padded_), space.scores.of(padded_)};
        block_ = space.block.of(hidden * kBlock);
        float* rows[7];
        for (int at = 0; at < 7; ++at) rows[at] = space.band[at].of(pairs_ * room_);
        band_ = {room_, rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], space.band_scores.of(room_)};
        query_gates_ = space.query_gates.of(pairs_ * room_);
        d_scores_ = space.d_scores.of(room_);
        hidden_ = space.hidden.of(hidden * room_);
        slopes_ = space.slopes.of(hidden * room_);
        change_ = space.change.of(hidden * room_);
        query_ = space.query.of(b_.num_query * wide_);
        d_query_ = space.d_query.of(b_.num_query * wide_);
        space.numbers.resize(padded_);
        std::iota(space.numbers.begin(), space.numbers.end(), 0);
        space.chosen.resize(padded_);
        space.negatives.resize(room_);
        space.values.resize(padded_);
    }

    // The loss of a group's positions, and their gradients; those of its items are in sums until `add_items`.
    void run(int64_t group) {
        const WithoutDenormals guard;
        const int64_t first = group * b_.group_size, end = std::min(first + b_.group_size, b_.num_positions);
        rows_ = b_.rows + group * b_.num_negatives;
        gather_items();
        space_.parts.clear();
        used_ = 0;
        for (int64_t begin = first; begin < end; begin += kPositions) {
            const int64_t count = std::min(kPositions, end - begin);
            score_components(begin, count);
            for (int64_t s = begin; s < begin + count; ++s) {
                all_.cosines = cosines_ + (s - begin) * pairs_ * padded_;
                forward(s);
                add_to_band(s, choose(s));
            }
        }
        flush();
    }

    void add_items() const {
        for (int64_t k = 0; k < b_.num_negatives; ++k) {
            for (int64_t x = 0; x < b_.num_item; ++x) {
                float* const to = out_.items + (rows_[k] * b_.num_item + x) * b_.width;
                const float* const from = item_sums_ + k * stride_ + x * wide_;
                for (int64_t at = 0; at < b_.width; ++at) to[at] += from[at];
            }
            for (int64_t p = 0; p < pairs_; ++p) out_.item_gate[rows_[k] * pairs_ + p] += gate_sums_[k * pairs_ + p];
        }
    }

    // Adds the pair network's gradients of all groups so far, and returns their loss.
    double finish() const {
        const auto add = [](float* to, const float* from, int64_t count) {
            for (int64_t at = 0; at < count; ++at) to[at] += sum_of(load(from + at * kLanes));
        };
        add(out_.hidden_weight, hidden_weight_, b_.num_hidden * pairs_);
        add(out_.hidden_bias, hidden_bias_, b_.num_hidden);
        add(out_.out_weight, out_weight_, pairs_ * b_.num_hidden);
        add(out_.out_bias, out_bias_, pairs_);
        return loss_;
    }

  private:
    // Columns of components and gates for the forward pass, rows for the backward pass, and sums of nothing.
    void gather_items() {
        const int64_t floats = b_.num_item * b_.width;
        for (int64_t k = 0; k < padded_; k += kLanes) {
            const float *items[kLanes], *gates[kLanes];
            for (int lane = 0; lane < kLanes; ++lane) {
                const int64_t row = rows_[std::min(k + lane, b_.num_negatives - 1)];
                items[lane] = b_.items + row * floats;
                gates[lane] = b_.item_gate + row * pairs_;
            }
            for (int64_t at = 0; at < floats; ++at)
                for (int lane = 0; lane < kLanes; ++lane) items_[at * padded_ + k + lane] = items[lane][at];
            for (int64_t p = 0; p < pairs_; ++p)
                for (int lane = 0; lane < kLanes; ++lane) item_gates_[p * padded_ + k + lane] = gates[lane][p];
        }
        for (int64_t k = 0; k < b_.num_negatives; ++k)
            for (int64_t x = 0; x < b_.num_item; ++x)
                std::copy_n(b_.items + (rows_[k] * b_.num_item + x) * b_.width, b_.width, item_rows_ + k * stride_ + x * wide_);
        std::fill_n(item_sums_, b_.num_negatives * stride_, 0.0f);
        std::fill_n(gate_sums_, b_.num_negatives * pairs_, 0.0f);
    }

    // Cosines of `count` positions from `begin` on with all negatives.
    void score_components(int64_t begin, int64_t count) {
        constexpr int64_t width = kColumns * kLanes;
        for (int64_t x = 0; x < b_.num_item; ++x)
            for (int64_t at = 0; at < padded_; at += width)
                for (int64_t s = 0; s < count; ++s) {
                    float* const to = cosines_ + (s * pairs_ + x) * padded_ + at;
                    product(b_.num_query, std::min(width, padded_ - at),
                            {b_.query + (begin + s) * b_.num_query * b_.width, b_.width, 1},
                            items_ + x * b_.width * padded_ + at, padded_, b_.width, zero,
                            [&](int64_t q, int64_t n, Floats sum) { store(to + q * b_.num_item * padded_ + n, sum); });
                }
    }

    // Scores of a position with all negatives.
    void forward(int64_t position) {
        drop_pairs(all_, position, space_.numbers.data(), 0, padded_);
        const float* const of_query = b_.query_gate + position * pairs_;
        for (int64_t at = 0; at < padded_; at += kBlock)
            network<false>(all_, at, std::min(kBlock, padded_ - at), block_, nullptr, kBlock, [&](int64_t p, int64_t n) {
                return b_.out_bias[p] + of_query[p] * load(item_gates_ + p * padded_ + at + n);
            });
        for (int64_t at = 0; at < padded_; at += kLanes) weigh(all_, position, space_.numbers.data(), at);
    }

    // SiLU, and its derivative where asked for.
    template <bool kSlope>
    static Floats activate(Floats value, float* slope) {
        const Floats x = max(value, splat(-87.3f));
        const Floats sigmoid = reciprocal(1.0f + exp_in_range(-min(x, splat(87.3f))));
        const Floats y = x * sigmoid;
        if (kSlope) store(slope, sigmoid + y * (1.0f - sigmoid));
        return y;
    }

    // The gates of `width` columns from `at` on, before the softmax; hidden units, `hidden_row` floats apart.
    template <bool kSlopes, typename Start>
    void network(const Columns& columns, int64_t at, int64_t width, float* hidden, float* slopes, int64_t hidden_row,
                 const Start& start) const {
        product(b_.num_hidden, width, {b_.hidden_weight, pairs_, 1}, (drops_pairs_ ? columns.read : columns.cosines) + at,
                columns.row, pairs_, [&](int64_t h, int64_t) { return splat(b_.hidden_bias[h]); },
                [&](int64_t h, int64_t n, Floats sum) {
                    const int64_t to = h * hidden_row + n;
                    store(hidden + to, activate<kSlopes>(sum, slopes + to));
                });
        product(pairs_, width, {b_.out_weight, b_.num_hidden, 1}, hidden, hidden_row, b_.num_hidden, start,
                [&](int64_t p, int64_t n, Floats sum) {
                    const int64_t to = p * columns.row + at + n;
                    store(columns.gates + to, activate<kSlopes>(sum, columns.gate_slopes + to));
                });
    }

    // The cosines that the network reads.
    void drop_pairs(const Columns& columns, int64_t position, const int32_t* negatives, int64_t begin, int64_t count) const {
        if (!drops_pairs_) return;
        for (int64_t p = 0; p < pairs_; ++p)
            for (int64_t at = begin; at < begin + count; at += kLanes) {
                const Floats factor = kept(b_.seed, counter(position, p), negatives + at, b_.pair_dropout);
                store(columns.kept + p * columns.row + at, factor);
                store(columns.read + p * columns.row + at, factor * load(columns.cosines + p * columns.row + at));
            }
    }

    uint32_t counter(int64_t position, int64_t p) const { return static_cast<uint32_t>((position * pairs_ + p) * padded_); }

    // Pair weights and score of one vector of pairs.
    void weigh(const Columns& columns, int64_t position, const int32_t* negatives, int64_t at) const {
        const int64_t row = columns.row;
        const float* const gates = columns.gates + at;
        float* const weights = columns.weights + at;
        Floats highest = load(gates);
        for (int64_t p = 1; p < pairs_; ++p) highest = max(highest, load(gates + p * row));
        Floats total = splat(0.0f);
        for (int64_t p = 0; p < pairs_; ++p) {
            const Floats weight = exp_not_positive(load(gates + p * row) - highest);
            total += weight;
            store(weights + p * row, weight);
        }
        Floats scale = 1.0f / total;
        if (b_.gate_dropout > 0) {
            Floats left = splat(0.0f);
            for (int64_t p = 0; p < pairs_; ++p) {
                const Floats mask = kept(~b_.seed, counter(position, p), negatives + at, b_.gate_dropout);
                const Floats weight = (mask > splat(0.0f)) ? load(weights + p * row) * scale : splat(0.0f);
                left += weight;
                store(weights + p * row, weight);
            }
            scale = 1.0f / max(left, splat(1e-6f));
        }
        Floats score = splat(0.0f);
        for (int64_t p = 0; p < pairs_; ++p) {
            const Floats weight = load(weights + p * row) * scale;
            store(weights + p * row, weight);
            score += weight * load(columns.cosines + p * row + at);
        }
        store(columns.scores + at, score);
    }

    // Adds a position's loss, and chooses the negatives that have a gradient: how many, in space.chosen, with the scores'
    // gradients in space.values. Systematic sampling: negative k, of gradient g_k, is taken where the running sum of q_k =
    // min(1, kept g_k / sum g) passes a whole number, and counts g_k / q_k. The sum runs down each lane in turn.
    int64_t choose(int64_t position) {
        float* const values = all_.scores;
        const int64_t target = b_.targets[position];
        const float positive = b_.positive[position] / b_.tau;
        for (int64_t k = 0; k < padded_; ++k)
            values[k] = k < b_.num_negatives && rows_[k] != target ? values[k] / b_.tau + b_.correction : kNone;
        Floats highest = splat(positive);
        for (int64_t at = 0; at < padded_; at += kLanes) highest = max(highest, load(values + at));
        const float top = highest_of(highest);
        Floats sum = splat(0.0f);
        for (int64_t at = 0; at < padded_; at += kLanes) {
            const Floats logit = load(values + at);
            const Floats value = logit > splat(kNone) ? exp_not_positive(logit - top) : splat(0.0f);
            sum += value;
            store(values + at, value);
        }
        const float others = sum_of(sum), own = std::exp(positive - top), scale = 1.0f / ((others + own) * b_.tau);
        loss_ += std::log(static_cast<double>(others) + own) + top - positive;
        out_.positive[position] = -others * scale;

        int64_t found = 0;
        const bool thins = b_.backward_negatives > 0;
        const float rate = thins ? b_.backward_negatives / std::max(others, 1e-30f) : 3e38f;
        const auto probability = [&](int64_t at) { return min(load(values + at) * rate, splat(1.0f)); };
        Floats marks = splat(0.0f);
        for (int64_t at = 0; at < padded_; at += kLanes) marks += probability(at);
        float mark = thins ? b_.uniforms[position] : 0.0f;
        for (int lane = 0; lane < kLanes; ++lane) {
            const float own_sum = marks[lane];
            marks[lane] = mark;
            mark += own_sum;
        }
        for (int64_t at = 0; at < padded_; at += kLanes) {
            const Floats value = load(values + at), q = probability(at), next = marks + q;
            const Ints passed = thins ? __builtin_convertvector(next, Ints) > __builtin_convertvector(marks, Ints) : value > splat(0.0f);
            const Floats gradient = (q < splat(1.0f) ? splat(1.0f / rate) : value) * scale;
            marks = next;
            for (int lane = 0; lane < kLanes; ++lane) {
                space_.chosen[found] = static_cast<int32_t>(at + lane);
                space_.values[found] = gradient[lane];
                found -= passed[lane];
            }
        }
        return found;
    }

    // Gathers the `count` chosen negatives of a position, then as many of gradient zero as fill a vector.
    void add_to_band(int64_t position, int64_t count) {
        if (!count) return;
        const int64_t whole = whole_vectors(count);
        if (used_ + whole > room_) flush();
        int32_t* const chosen = space_.negatives.data() + used_;
        for (int64_t k = 0; k < whole; ++k) {
            chosen[k] = k < count ? space_.chosen[k] : 0;
            d_scores_[used_ + k] = k < count ? space_.values[k] : 0.0f;
        }
        for (int64_t p = 0; p < pairs_; ++p) {
            const int64_t to = p * room_ + used_;
            for (int64_t k = 0; k < whole; ++k) {
                band_.cosines[to + k] = all_.cosines[p * padded_ + chosen[k]];
                band_.item_gates[to + k] = item_gates_[p * padded_ + chosen[k]];
            }
            std::fill_n(query_gates_ + to, whole, b_.query_gate[position * pairs_ + p]);
        }
        space_.parts.push_back({position, used_, whole});
        used_ += whole;
    }

    // The gradients of the band's columns.
    void flush() {
        const int64_t row = room_, used = used_, hidden = b_.num_hidden;
        const int32_t* const negatives = space_.negatives.data();
        for (const Part& part : space_.parts) drop_pairs(band_, part.position, negatives, part.begin, part.count);
        network<true>(band_, 0, used, hidden_, slopes_, row, [&](int64_t p, int64_t n) {
            return b_.out_bias[p] + load(query_gates_ + p * row + n) * load(band_.item_gates + p * row + n);
        });
        for (const Part& part : space_.parts)
            for (int64_t at = part.begin; at < part.begin + part.count; at += kLanes)
                weigh(band_, part.position, negatives, at);
        // The weights w are a softmax of y = SiLU(z): ds / dy_p = w_p (c_p - s); ds / dc_p = w_p + the network's path.
        for (int64_t p = 0; p < pairs_; ++p) {
            Floats bias = load(out_bias_ + p * kLanes);
            for (int64_t n = 0; n < used; n += kLanes) {
                const int64_t at = p * row + n;
                const Floats weight = load(band_.weights + at) * load(d_scores_ + n);
                const Floats d_gate = (load(band_.cosines + at) - load(band_.scores + n)) * weight * load(band_.gate_slopes + at);
                store(band_.weights + at, weight);
                store(band_.gates + at, d_gate);
                bias += d_gate;
            }
            store(out_bias_ + p * kLanes, bias);
            for (const Part& part : space_.parts) {
                const float of_query = b_.query_gate[part.position * pairs_ + p];
                const float* const d_gates = band_.gates + p * row + part.begin;
                Floats to_query = splat(0.0f);
                for (int64_t k = 0; k < part.count; k += kLanes)
                    to_query += load(d_gates + k) * load(band_.item_gates + p * row + part.begin + k);
                for (int64_t k = 0; k < part.count; ++k)
                    gate_sums_[negatives[part.begin + k] * pairs_ + p] += d_gates[k] * of_query;
                out_.query_gate[part.position * pairs_ + p] = sum_of(to_query);
            }
        }
        add_inner(out_weight_, pairs_, hidden, band_.gates, hidden_, row, used);
        product(hidden, used, {b_.out_weight, 1, hidden}, band_.gates, row, pairs_, zero, [&](int64_t h, int64_t n, Floats sum) {
            const Floats d_hidden = sum * load(slopes_ + h * row + n);
            store(change_ + h * row + n, d_hidden);
            store(hidden_bias_ + h * kLanes, load(hidden_bias_ + h * kLanes) + d_hidden);
        });
        add_inner(hidden_weight_, hidden, pairs_, change_, drops_pairs_ ? band_.read : band_.cosines, row, used);
        product(pairs_, used, {b_.hidden_weight, 1, pairs_}, change_, row, hidden, zero, [&](int64_t p, int64_t n, Floats sum) {
            const int64_t at = p * row + n;
            store(band_.weights + at, load(band_.weights + at) + (drops_pairs_ ? sum * load(band_.kept + at) : sum));
        });
        for (const Part& part : space_.parts) add_components(part);
        space_.parts.clear();
        used_ = 0;
    }

    // From the cosines' gradients, in band.weights, to those of one position's components and of its negatives'.
    void add_components(const Part& part) {
        const int64_t queries = b_.num_query;
        for (int64_t q = 0; q < queries; ++q)
            std::copy_n(b_.query + (part.position * queries + q) * b_.width, b_.width, query_ + q * wide_);
        std::fill_n(d_query_, queries * wide_, 0.0f);
        for (int64_t x = 0; x < b_.num_item; ++x)
            for (int64_t q = 0; q < queries;) {
                const bool tall = queries - q >= 4;
                const Scalars d_cosines{band_.weights + (q * b_.num_item + x) * room_ + part.begin, b_.num_item * room_, 1};
                for (int64_t n = 0; n < wide_;) {
                    const bool wide = wide_ - n >= kColumns * kLanes;
                    const auto add = !tall ? (wide ? to_components<1, kColumns> : to_components<1, 1>)
                                           : (wide ? to_components<4, kColumns> : to_components<4, 1>);
                    const int64_t of_items = x * wide_ + n, of_query = q * wide_ + n;
                    add(d_cosines, space_.negatives.data() + part.begin, part.count, item_rows_ + of_items, item_sums_ + of_items,
                        stride_, query_ + of_query, d_query_ + of_query, wide_);
                    n += wide ? kColumns * kLanes : kLanes;
                }
                q += tall ? 4 : 1;
            }
        for (int64_t q = 0; q < queries; ++q)
            std::copy_n(d_query_ + q * wide_, b_.width, out_.query + (part.position * queries + q) * b_.width);
    }

    const Batch& b_;
    const Gradients& out_;
    const int64_t pairs_, padded_, wide_, stride_, room_;  // P, K', d', P_x d', W
    const bool drops_pairs_;
    Space& space_;
    const int64_t* rows_ = nullptr;  // (K,) of the group
    int64_t used_ = 0;               // columns of the band
    double loss_ = 0;
    float *items_, *item_gates_, *item_rows_;  // (P_x, d, K'), (P, K'), (K, P_x, d')
    float *item_sums_, *gate_sums_;            // (K, P_x, d'), (K, P)
    float *hidden_weight_, *out_weight_, *hidden_bias_, *out_bias_;  // a vector of partial sums per element
    float *cosines_, *block_;                                        // (positions, P, K'), (G, block)
    Columns all_, band_;
    float *query_gates_, *d_scores_, *hidden_, *slopes_, *change_;  // of the band: (P, W), (W,), (G, W) three times
    float *query_, *d_query_;                                       // (P_q, d')
};

}  // namespace

// The summed loss of all positions; its gradients are added.
extern "C" double freshet_mol_sampled_softmax(const Batch* batch, const Gradients* gradients) {
    static thread_local std::vector<std::unique_ptr<Space>> spaces;
    const int64_t groups = (batch->num_positions + batch->group_size - 1) / batch->group_size;
    const int64_t threads = std::min(batch->threads, groups);
    std::vector<Worker> workers;
    workers.reserve(threads);
    for (int64_t number = 0; number < threads; ++number) {
        if (number == static_cast<int64_t>(spaces.size())) spaces.push_back(std::make_unique<Space>());
        workers.emplace_back(*batch, *gradients, *spaces[number]);
    }
    for (int64_t first = 0; first < groups; first += threads) {
        const int64_t count = std::min(threads, groups - first);
        parallel_tiles(count, count, [&](int64_t number, int) { workers[number].run(first + number); });
        for (int64_t number = 0; number < count; ++number) workers[number].add_items();
    }
    double loss = 0;
    for (const Worker& worker : workers) loss += worker.finish();
    return loss;
}
