// The sampled softmax over mixture-of-logits scores of positions with their group's negatives, and all its gradients: the
// inner loop of training, one pass.
//
// A few positions' cosines with all negatives are computed together. Their mean chooses the negatives that the mixture
// scores; those are gathered into a band with other positions', whose network, losses and gradients are computed while it
// is in the first two caches: nothing of size R K G is ever stored. Pairs lie along the lanes, components and hidden units
// along the rows, so every product of matrices broadcasts a scalar of one factor and the softmax over components is a few
// vector operations. Threads take groups; what a group adds to items is added in the groups' order, and each thread's sums
// of weights in the threads': the same threads give the same bits.
//
// Letters: N positions, R positions per group, K negatives per group, K' = K rounded up to whole vectors, M items, P_q, P_x
// components, P = P_q P_x, d component width, d' rounded up, G hidden width of the pair network, W = floats in a row of a
// band.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
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
    int64_t scored_negatives;              // 0: all
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
constexpr int64_t kBand = 128;      // columns, at least
constexpr int64_t kPositions = 8;   // whose cosines are computed together, so that items are read from the cache
constexpr float kNone = -3e38f;     // the logit of what does not count
// Of the probability of being chosen: how sharp the mean cosine's logit is, and the share that is equal for all.
constexpr float kSharpness = 0.7f, kUniform = 0.2f;

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

// 1 / (1 - probability) or 0 per lane: a counter-based draw, equal for equal (seed, counter + negative), whichever thread
// draws it. `negatives`: kLanes of them.
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

// A thread's memory.
struct Space {
    Buffer items, item_gates, item_rows, item_sums, gate_sums, weight_sums, all_cosines, probabilities;
    Buffer cosines, kept, read, item_gates_of, query_gates, gates, gate_slopes, weights, scores, factors;
    Buffer hidden, slopes, change, query, d_query;
    std::vector<int32_t> chosen, negatives;
    std::vector<float> factors_of_chosen;
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
        all_cosines_ = space.all_cosines.of(kPositions * pairs_ * padded_);
        probabilities_ = space.probabilities.of(padded_);
        cosines_ = space.cosines.of(pairs_ * room_);
        kept_ = drops_pairs_ ? space.kept.of(pairs_ * room_) : nullptr;
        read_ = drops_pairs_ ? space.read.of(pairs_ * room_) : cosines_;
        gates_of_item_ = space.item_gates_of.of(pairs_ * room_);
        gates_of_query_ = space.query_gates.of(pairs_ * room_);
        gates_ = space.gates.of(pairs_ * room_);
        gate_slopes_ = space.gate_slopes.of(pairs_ * room_);
        weights_ = space.weights.of(pairs_ * room_);
        scores_ = space.scores.of(room_);
        factors_ = space.factors.of(room_);
        hidden_ = space.hidden.of(hidden * room_);
        slopes_ = space.slopes.of(hidden * room_);
        change_ = space.change.of(hidden * room_);
        query_ = space.query.of(b_.num_query * wide_);
        d_query_ = space.d_query.of(b_.num_query * wide_);
        space.chosen.resize(padded_);
        space.factors_of_chosen.resize(padded_);
        space.negatives.resize(room_);
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
                const float* const cosines = all_cosines_ + (s - begin) * pairs_ * padded_;
                add_to_band(s, cosines, choose(s, cosines));
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
                    float* const to = all_cosines_ + (s * pairs_ + x) * padded_ + at;
                    product(b_.num_query, std::min(width, padded_ - at),
                            {b_.query + (begin + s) * b_.num_query * b_.width, b_.width, 1},
                            items_ + x * b_.width * padded_ + at, padded_, b_.width, zero,
                            [&](int64_t q, int64_t n, Floats sum) { store(to + q * b_.num_item * padded_ + n, sum); });
                }
    }

    // Chooses the negatives that a position is scored with: how many; their numbers and 1 / q_k are in `space`. Negative k
    // is chosen with probability q_k = min(1, a exp(mean cosine / tau) + b): where the running sum of q passes a whole
    // number (systematic sampling). The sum runs down each lane in turn.
    int64_t choose(int64_t position, const float* cosines) {
        float* const q = probabilities_;
        const float sharpness = kSharpness / (b_.tau * pairs_);
        for (int64_t at = 0; at < padded_; at += kLanes) {
            Floats sum = load(cosines + at);
            for (int64_t p = 1; p < pairs_; ++p) sum += load(cosines + p * padded_ + at);
            store(q + at, sum * sharpness);
        }
        const int64_t target = b_.targets[position];
        for (int64_t k = 0; k < padded_; ++k) q[k] = k < b_.num_negatives && rows_[k] != target ? q[k] : kNone;
        Floats highest = splat(kNone), sum = splat(0.0f), count = splat(0.0f);
        for (int64_t at = 0; at < padded_; at += kLanes) highest = max(highest, load(q + at));
        const float top = highest_of(highest);
        for (int64_t at = 0; at < padded_; at += kLanes) {
            const Floats logit = load(q + at);
            const Floats value = logit > splat(kNone) ? exp_not_positive(logit - top) : splat(0.0f);
            sum += value;
            count += value > splat(0.0f) ? splat(1.0f) : splat(0.0f);
            store(q + at, value);
        }
        const float wanted = b_.scored_negatives, a = wanted * (1 - kUniform) / sum_of(sum);
        const float b = wanted ? wanted * kUniform / sum_of(count) : 1.0f;
        Floats marks = splat(0.0f);
        for (int64_t at = 0; at < padded_; at += kLanes) {
            const Floats value = load(q + at);
            const Floats probability = value > splat(0.0f) ? min(a * value + b, splat(1.0f)) : splat(0.0f);
            store(q + at, probability);
            marks += probability;
        }
        float mark = b_.uniforms[position];
        for (int lane = 0; lane < kLanes; ++lane) {
            const float of_lane = marks[lane];
            marks[lane] = mark;
            mark += of_lane;
        }
        int64_t found = 0;
        for (int64_t at = 0; at < padded_; at += kLanes) {
            const Floats probability = load(q + at), next = marks + probability;
            const Ints passed = __builtin_convertvector(next, Ints) > __builtin_convertvector(marks, Ints);
            const Floats factor = 1.0f / probability;
            marks = next;
            for (int lane = 0; lane < kLanes; ++lane) {
                space_.chosen[found] = static_cast<int32_t>(at + lane);
                space_.factors_of_chosen[found] = factor[lane];
                found -= passed[lane];
            }
        }
        return found;
    }

    // Gathers the `count` chosen negatives of a position, then as many that count nothing as fill a vector.
    void add_to_band(int64_t position, const float* cosines, int64_t count) {
        if (!count) return;
        const int64_t whole = whole_vectors(count);
        if (used_ + whole > room_) flush();
        int32_t* const chosen = space_.negatives.data() + used_;
        for (int64_t k = 0; k < whole; ++k) {
            chosen[k] = k < count ? space_.chosen[k] : 0;
            factors_[used_ + k] = k < count ? space_.factors_of_chosen[k] : 0.0f;
        }
        for (int64_t p = 0; p < pairs_; ++p) {
            const int64_t to = p * room_ + used_;
            for (int64_t k = 0; k < whole; ++k) {
                cosines_[to + k] = cosines[p * padded_ + chosen[k]];
                gates_of_item_[to + k] = item_gates_[p * padded_ + chosen[k]];
            }
            std::fill_n(gates_of_query_ + to, whole, b_.query_gate[position * pairs_ + p]);
        }
        space_.parts.push_back({position, used_, whole});
        used_ += whole;
    }

    // The loss of the band's positions, and the gradients of its columns.
    void flush() {
        for (const Part& part : space_.parts) drop_pairs(part);
        product(b_.num_hidden, used_, {b_.hidden_weight, pairs_, 1}, read_, room_, pairs_,
                [&](int64_t h, int64_t) { return splat(b_.hidden_bias[h]); },
                [&](int64_t h, int64_t n, Floats sum) { activate(sum, hidden_ + h * room_ + n, slopes_ + h * room_ + n); });
        product(pairs_, used_, {b_.out_weight, b_.num_hidden, 1}, hidden_, room_, b_.num_hidden,
                [&](int64_t p, int64_t n) {
                    return b_.out_bias[p] + load(gates_of_query_ + p * room_ + n) * load(gates_of_item_ + p * room_ + n);
                },
                [&](int64_t p, int64_t n, Floats sum) { activate(sum, gates_ + p * room_ + n, gate_slopes_ + p * room_ + n); });
        for (const Part& part : space_.parts) {
            for (int64_t at = part.begin; at < part.begin + part.count; at += kLanes) weigh(part.position, at);
            add_loss(part);
        }
        differentiate();
        for (const Part& part : space_.parts) add_components(part);
        space_.parts.clear();
        used_ = 0;
    }

    // SiLU and its derivative.
    static void activate(Floats value, float* to, float* slope) {
        const Floats x = max(value, splat(-87.3f));
        const Floats sigmoid = reciprocal(1.0f + exp_in_range(-min(x, splat(87.3f))));
        const Floats y = x * sigmoid;
        store(to, y);
        store(slope, sigmoid + y * (1.0f - sigmoid));
    }

    // The cosines that the network reads.
    void drop_pairs(const Part& part) {
        if (!drops_pairs_) return;
        for (int64_t p = 0; p < pairs_; ++p)
            for (int64_t at = part.begin; at < part.begin + part.count; at += kLanes) {
                const Floats factor = kept(b_.seed, counter(part.position, p), space_.negatives.data() + at, b_.pair_dropout);
                store(kept_ + p * room_ + at, factor);
                store(read_ + p * room_ + at, factor * load(cosines_ + p * room_ + at));
            }
    }

    uint32_t counter(int64_t position, int64_t p) const { return static_cast<uint32_t>((position * pairs_ + p) * padded_); }

    // Pair weights and score of one vector of pairs.
    void weigh(int64_t position, int64_t at) {
        const float* const gates = gates_ + at;
        float* const weights = weights_ + at;
        Floats highest = load(gates);
        for (int64_t p = 1; p < pairs_; ++p) highest = max(highest, load(gates + p * room_));
        Floats total = splat(0.0f);
        for (int64_t p = 0; p < pairs_; ++p) {
            const Floats weight = exp_not_positive(load(gates + p * room_) - highest);
            total += weight;
            store(weights + p * room_, weight);
        }
        Floats scale = 1.0f / total;
        if (b_.gate_dropout > 0) {
            Floats left = splat(0.0f);
            for (int64_t p = 0; p < pairs_; ++p) {
                const Floats mask = kept(~b_.seed, counter(position, p), space_.negatives.data() + at, b_.gate_dropout);
                const Floats weight = (mask > splat(0.0f)) ? load(weights + p * room_) * scale : splat(0.0f);
                left += weight;
                store(weights + p * room_, weight);
            }
            scale = 1.0f / max(left, splat(1e-6f));
        }
        Floats score = splat(0.0f);
        for (int64_t p = 0; p < pairs_; ++p) {
            const Floats weight = load(weights + p * room_) * scale;
            store(weights + p * room_, weight);
            score += weight * load(cosines_ + p * room_ + at);
        }
        store(scores_ + at, score);
    }

    // A position's loss; its gradients with respect to the scores take the place of the columns' factors 1 / q.
    void add_loss(const Part& part) {
        const float positive = b_.positive[part.position] / b_.tau;
        const auto logit = [&](int64_t at) { return load(scores_ + at) / b_.tau + b_.correction; };
        const int64_t end = part.begin + part.count;
        Floats highest = splat(positive), sum = splat(0.0f);
        for (int64_t at = part.begin; at < end; at += kLanes)
            highest = max(highest, load(factors_ + at) > splat(0.0f) ? logit(at) : splat(kNone));
        const float top = highest_of(highest);
        for (int64_t at = part.begin; at < end; at += kLanes) {
            const Floats value = load(factors_ + at) * exp_saturated(logit(at) - top);
            store(factors_ + at, value);
            sum += value;
        }
        const float others = sum_of(sum), own = std::exp(positive - top), scale = 1.0f / ((others + own) * b_.tau);
        for (int64_t at = part.begin; at < end; at += kLanes) store(factors_ + at, load(factors_ + at) * scale);
        loss_ += std::log(static_cast<double>(others) + own) + top - positive;
        out_.positive[part.position] = -others * scale;
    }

    // From the scores' gradients, in factors_, to those of the gates, the network and the cosines, which take the place of
    // the weights. The weights w are a softmax of y = SiLU(z): ds / dy_p = w_p (c_p - s); ds / dc_p = w_p + the network's.
    void differentiate() {
        const int64_t row = room_, used = used_, hidden = b_.num_hidden;
        for (int64_t p = 0; p < pairs_; ++p) {
            Floats bias = load(out_bias_ + p * kLanes);
            for (int64_t n = 0; n < used; n += kLanes) {
                const int64_t at = p * row + n;
                const Floats weight = load(weights_ + at) * load(factors_ + n);
                const Floats d_gate = (load(cosines_ + at) - load(scores_ + n)) * weight * load(gate_slopes_ + at);
                store(weights_ + at, weight);
                store(gates_ + at, d_gate);
                bias += d_gate;
            }
            store(out_bias_ + p * kLanes, bias);
            for (const Part& part : space_.parts) {
                const float of_query = b_.query_gate[part.position * pairs_ + p];
                const float* const d_gates = gates_ + p * row + part.begin;
                const int32_t* const negatives = space_.negatives.data() + part.begin;
                Floats to_query = splat(0.0f);
                for (int64_t k = 0; k < part.count; k += kLanes)
                    to_query += load(d_gates + k) * load(gates_of_item_ + p * row + part.begin + k);
                for (int64_t k = 0; k < part.count; ++k) gate_sums_[negatives[k] * pairs_ + p] += d_gates[k] * of_query;
                out_.query_gate[part.position * pairs_ + p] = sum_of(to_query);
            }
        }
        add_inner(out_weight_, pairs_, hidden, gates_, hidden_, row, used);
        product(hidden, used, {b_.out_weight, 1, hidden}, gates_, row, pairs_, zero, [&](int64_t h, int64_t n, Floats sum) {
            const Floats d_hidden = sum * load(slopes_ + h * row + n);
            store(change_ + h * row + n, d_hidden);
            store(hidden_bias_ + h * kLanes, load(hidden_bias_ + h * kLanes) + d_hidden);
        });
        add_inner(hidden_weight_, hidden, pairs_, change_, read_, row, used);
        product(pairs_, used, {b_.hidden_weight, 1, pairs_}, change_, row, hidden, zero, [&](int64_t p, int64_t n, Floats sum) {
            const int64_t at = p * row + n;
            store(weights_ + at, load(weights_ + at) + (drops_pairs_ ? sum * load(kept_ + at) : sum));
        });
    }

    // From the cosines' gradients, in weights_, to those of one position's components and of its negatives'.
    void add_components(const Part& part) {
        const int64_t queries = b_.num_query;
        for (int64_t q = 0; q < queries; ++q)
            std::copy_n(b_.query + (part.position * queries + q) * b_.width, b_.width, query_ + q * wide_);
        std::fill_n(d_query_, queries * wide_, 0.0f);
        for (int64_t x = 0; x < b_.num_item; ++x)
            for (int64_t q = 0; q < queries;) {
                const bool tall = queries - q >= 4;
                const Scalars d_cosines{weights_ + (q * b_.num_item + x) * room_ + part.begin, b_.num_item * room_, 1};
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
    float *all_cosines_, *probabilities_;                            // (positions, P, K'), (K',)
    // The band: (P, W), (W,) and (G, W).
    float *cosines_, *kept_, *read_, *gates_of_item_, *gates_of_query_, *gates_, *gate_slopes_, *weights_;
    float *scores_, *factors_, *hidden_, *slopes_, *change_;
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
