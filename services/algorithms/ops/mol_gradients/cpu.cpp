// Mixture-of-logits scores of a group of positions with the negatives that they share, and the gradients of a loss over
// them: the inner loop of training.
//
// A band of positions runs from cosines to scores while its activations are in the first two caches, and the backward
// pass computes them again: nothing of size R K G is ever stored. Pairs lie along the lanes, components and hidden units
// along the rows, so every product of matrices broadcasts a scalar of one factor and the softmax over components is a
// few vector operations. Each thread takes every T-th band and has sums of its own, added up in order: the same threads
// give the same bits.
//
// Letters: R positions, K negatives, K' = K rounded up to whole vectors, M items, P_q, P_x components, P = P_q P_x,
// d component width, d' rounded up, G hidden width of the pair network, W = floats in a row of a band, S K'.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "parallel.hpp"
#include "vector.hpp"

#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace {

using namespace freshet;

using Words = uint32_t __attribute__((vector_size(4 * kLanes)));

constexpr int64_t kBandFloats = 256;
#ifdef __AVX512F__
constexpr int kColumns = 4;  // times 4 rows: 16 of 32 registers hold sums
#else
constexpr int kColumns = 2;
#endif

int64_t whole_vectors(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Floats that begin on a cache line.
class Buffer {
  public:
    explicit Buffer(int64_t size = 0) : space_(size + 16) {
        const auto address = reinterpret_cast<uintptr_t>(space_.data());
        begin_ = space_.data() + (-address % 64) / sizeof(float);
    }
    Buffer(Buffer&&) = default;
    Buffer& operator=(Buffer&&) = default;
    float* operator+(int64_t offset) const { return begin_ + offset; }
    float* get() const { return begin_; }

  private:
    std::vector<float> space_;
    float* begin_;
};

// A factor whose elements are broadcast: element (m, k) at data[m * row + k * column].
struct Scalars {
    const float* data;
    int64_t row, column;
};

template <int M, int N>
void add_product_tile(float* out, int64_t out_row, Scalars a, const float* b, int64_t b_row, int64_t depth) {
    Floats sums[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) sums[m][n] = load(out + m * out_row + n * kLanes);
    for (int64_t k = 0; k < depth; ++k) {
        Floats column[N];
        for (int n = 0; n < N; ++n) column[n] = load(b + k * b_row + n * kLanes);
        for (int m = 0; m < M; ++m) {
            const float scalar = a.data[m * a.row + k * a.column];
            for (int n = 0; n < N; ++n) sums[m][n] += scalar * column[n];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(out + m * out_row + n * kLanes, sums[m][n]);
}

// out (rows, width) += a (rows, depth) b (depth, width); width in floats, whole vectors.
void add_product(float* out, int64_t out_row, int64_t rows, int64_t width, Scalars a, const float* b, int64_t b_row,
                 int64_t depth) {
    for (int64_t n = 0; n < width;) {
        const bool wide = width - n >= kColumns * kLanes;
        for (int64_t m = 0; m < rows;) {
            const bool tall = rows - m >= 4;
            const Scalars part{a.data + m * a.row, a.row, a.column};
            float* const to = out + m * out_row + n;
            if (tall && wide) add_product_tile<4, kColumns>(to, out_row, part, b + n, b_row, depth);
            else if (tall) add_product_tile<4, 1>(to, out_row, part, b + n, b_row, depth);
            else if (wide) add_product_tile<1, kColumns>(to, out_row, part, b + n, b_row, depth);
            else add_product_tile<1, 1>(to, out_row, part, b + n, b_row, depth);
            m += tall ? 4 : 1;
        }
        n += wide ? kColumns * kLanes : kLanes;
    }
}

template <int M, int N>
void add_inner_tile(float* sums, int64_t sums_row, const float* x, const float* y, int64_t width) {
    Floats held[M][N];
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) held[m][n] = load(sums + m * sums_row + n * kLanes);
    for (int64_t at = 0; at < width; at += kLanes) {
        Floats factor[N];
        for (int n = 0; n < N; ++n) factor[n] = load(y + n * width + at);
        for (int m = 0; m < M; ++m) {
            const Floats value = load(x + m * width + at);
            for (int n = 0; n < N; ++n) held[m][n] += value * factor[n];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) store(sums + m * sums_row + n * kLanes, held[m][n]);
}

// sums (rows, columns), a vector of partial sums each, += x (rows, width) y (columns, width)^T, lane by lane.
void add_inner(float* sums, int64_t rows, int64_t columns, const float* x, const float* y, int64_t width) {
    for (int64_t n = 0; n < columns;) {
        const bool wide = columns - n >= kColumns;
        for (int64_t m = 0; m < rows;) {
            const bool tall = rows - m >= 4;
            float* const to = sums + (m * columns + n) * kLanes;
            const int64_t row = columns * kLanes;
            if (tall && wide) add_inner_tile<4, kColumns>(to, row, x + m * width, y + n * width, width);
            else if (tall) add_inner_tile<4, 1>(to, row, x + m * width, y + n * width, width);
            else if (wide) add_inner_tile<1, kColumns>(to, row, x + m * width, y + n * width, width);
            else add_inner_tile<1, 1>(to, row, x + m * width, y + n * width, width);
            m += tall ? 4 : 1;
        }
        n += wide ? kColumns : 1;
    }
}

float sum_of(Floats values) {
    float sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += values[lane];
    return sum;
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

// 1 / (1 - probability) or 0 per lane: a counter-based draw, equal for equal (seed, counter), so that the backward pass
// draws what the forward pass drew.
Floats kept(uint64_t seed, uint32_t counter, float probability) {
    Words x;
    for (int lane = 0; lane < kLanes; ++lane) x[lane] = counter + lane;
    for (const uint32_t key : {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}) {
        x ^= key;
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = (x ^ (x >> 15)) * 0x846ca68bu;
        x ^= x >> 16;
    }
    const Floats uniform = __builtin_convertvector(x >> 8, Floats) * 0x1p-24f;
    return uniform >= splat(probability) ? splat(1.0f / (1.0f - probability)) : splat(0.0f);
}

}  // namespace

extern "C" {

struct Group {
    int64_t num_positions, num_negatives, num_query, num_item, width, num_hidden;
    const float *query, *query_gate;  // (R, P_q, d), (R, P)
    const float *items, *item_gate;   // (M, P_x, d), (M, P)
    const int64_t* chosen;            // (K,) rows of items
    const float *hidden_weight, *hidden_bias, *out_weight, *out_bias;  // (G, P), (G,), (P, G), (P,)
    float gate_dropout, pair_dropout;
    uint64_t seed;
    int64_t threads;
};

struct Gradients {
    float *query, *query_gate;  // (R, P_q, d), (R, P): written
    float *items, *item_gate;   // (K, P_x, d), (K, P): written, of the chosen in their order
    float *hidden_weight, *hidden_bias, *out_weight, *out_bias;  // added to
};

}  // extern "C"

namespace {

class Pass {
  public:
    Pass(const Group& group, bool backward)
        : g_(group),
          pairs_(group.num_query * group.num_item),
          padded_(whole_vectors(group.num_negatives)),
          band_(std::max<int64_t>(1, kBandFloats / padded_)),
          backward_(backward),
          items_(group.num_item * group.width * padded_),
          item_gates_(pairs_ * padded_) {
        for (int64_t k = 0; k < g_.num_negatives; ++k) {
            const float* const row = g_.items + g_.chosen[k] * g_.num_item * g_.width;
            for (int64_t at = 0; at < g_.num_item * g_.width; ++at) items_.get()[at * padded_ + k] = row[at];
            for (int64_t p = 0; p < pairs_; ++p) item_gates_.get()[p * padded_ + k] = g_.item_gate[g_.chosen[k] * pairs_ + p];
        }
    }

    int64_t num_bands() const { return (g_.num_positions + band_ - 1) / band_; }

  protected:
    // What one band holds, rows of W floats.
    struct Band {
        Band(const Pass& pass, bool backward)
            : row(pass.band_ * pass.padded_),
              cosines(pass.pairs_ * row),
              kept(pass.g_.pair_dropout > 0 ? pass.pairs_ * row : 0),
              read(pass.g_.pair_dropout > 0 ? pass.pairs_ * row : 0),
              hidden(pass.g_.num_hidden * row),
              slopes(backward ? pass.g_.num_hidden * row : 0),
              gates(pass.pairs_ * row),
              gate_slopes(backward ? pass.pairs_ * row : 0),
              weights(pass.pairs_ * row),
              scores(row) {}
        int64_t row, first = 0, count = 0;
        Buffer cosines, kept, read, hidden, slopes, gates, gate_slopes, weights, scores;
    };

    void forward(Band& band) const {
        const int64_t row = band.row, used = band.count * padded_;
        std::memset(band.cosines.get(), 0, sizeof(float) * pairs_ * row);
        for (int64_t s = 0; s < band.count; ++s) {
            const Scalars query{g_.query + (band.first + s) * g_.num_query * g_.width, g_.width, 1};
            for (int64_t x = 0; x < g_.num_item; ++x)
                add_product(band.cosines + x * row + s * padded_, g_.num_item * row, g_.num_query, padded_, query,
                            items_ + x * g_.width * padded_, padded_, g_.width);
        }
        const float* const read = drop_pairs(band);
        for (int64_t h = 0; h < g_.num_hidden; ++h) std::fill_n(band.hidden + h * row, used, g_.hidden_bias[h]);
        add_product(band.hidden.get(), row, g_.num_hidden, used, {g_.hidden_weight, pairs_, 1}, read, row, pairs_);
        for (int64_t h = 0; h < g_.num_hidden; ++h)
            activate(band.hidden + h * row, backward_ ? band.slopes + h * row : nullptr, used);
        for (int64_t p = 0; p < pairs_; ++p)
            for (int64_t s = 0; s < band.count; ++s) {
                const float of_query = g_.query_gate[(band.first + s) * pairs_ + p];
                for (int64_t k = 0; k < padded_; k += kLanes)
                    store(band.gates + p * row + s * padded_ + k,
                          g_.out_bias[p] + of_query * load(item_gates_ + p * padded_ + k));
            }
        add_product(band.gates.get(), row, pairs_, used, {g_.out_weight, g_.num_hidden, 1}, band.hidden.get(), row,
                    g_.num_hidden);
        for (int64_t p = 0; p < pairs_; ++p)
            activate(band.gates + p * row, backward_ ? band.gate_slopes + p * row : nullptr, used);
        for (int64_t at = 0; at < used; at += kLanes) weigh(band, at);
    }

    const Group& g_;
    int64_t pairs_, padded_, band_;
    bool backward_;
    Buffer items_;       // (P_x, d, K')
    Buffer item_gates_;  // (P, K')

  private:
    // SiLU in place, its derivative beside it where asked for.
    static void activate(float* values, float* slopes, int64_t count) {
        for (int64_t at = 0; at < count; at += kLanes) {
            const Floats x = max(load(values + at), splat(-87.3f));
            const Floats sigmoid = reciprocal(1.0f + exp_in_range(-min(x, splat(87.3f))));
            const Floats y = x * sigmoid;
            store(values + at, y);
            if (slopes) store(slopes + at, sigmoid + y * (1.0f - sigmoid));
        }
    }

    // The cosines that the network reads.
    const float* drop_pairs(Band& band) const {
        if (!(g_.pair_dropout > 0)) return band.cosines.get();
        for (int64_t p = 0; p < pairs_; ++p)
            for (int64_t at = 0; at < band.count * padded_; at += kLanes) {
                const Floats factor = kept(g_.seed, counter(band, p, at), g_.pair_dropout);
                store(band.kept + p * band.row + at, factor);
                store(band.read + p * band.row + at, factor * load(band.cosines + p * band.row + at));
            }
        return band.read.get();
    }

    uint32_t counter(const Band& band, int64_t p, int64_t at) const {
        return static_cast<uint32_t>((band.first * pairs_ + p) * padded_ * band_ + at);
    }

    // Pair weights and score of one vector of pairs.
    void weigh(Band& band, int64_t at) const {
        const int64_t row = band.row;
        Floats highest = load(band.gates + at);
        for (int64_t p = 1; p < pairs_; ++p) highest = max(highest, load(band.gates + p * row + at));
        Floats total = splat(0.0f);
        for (int64_t p = 0; p < pairs_; ++p) {
            Floats weight = exp_not_positive(load(band.gates + p * row + at) - highest);
            total += weight;
            store(band.weights + p * row + at, weight);
        }
        Floats scale = 1.0f / total;
        if (g_.gate_dropout > 0) {
            Floats left = splat(0.0f);
            for (int64_t p = 0; p < pairs_; ++p) {
                const Floats mask = kept(~g_.seed, counter(band, p, at), g_.gate_dropout);
                const Floats weight = (mask > splat(0.0f)) ? load(band.weights + p * row + at) * scale : splat(0.0f);
                left += weight;
                store(band.weights + p * row + at, weight);
            }
            scale = 1.0f / max(left, splat(1e-6f));
        }
        Floats score = splat(0.0f);
        for (int64_t p = 0; p < pairs_; ++p) {
            const Floats weight = load(band.weights + p * row + at) * scale;
            store(band.weights + p * row + at, weight);
            score += weight * load(band.cosines + p * row + at);
        }
        store(band.scores + at, score);
    }
};

class Forward : Pass {
  public:
    Forward(const Group& group, float* scores) : Pass(group, false), scores_(scores) {}

    void run() {
        const int64_t threads = std::min(g_.threads, num_bands());
        parallel_tiles(threads, threads, [&](int64_t first, int) {
            const WithoutDenormals zero;
            Band band(*this, false);
            for (int64_t number = first; number < num_bands(); number += threads) {
                band.first = number * band_;
                band.count = std::min(band_, g_.num_positions - band.first);
                forward(band);
                for (int64_t s = 0; s < band.count; ++s)
                    std::copy_n(band.scores + s * padded_, g_.num_negatives, scores_ + (band.first + s) * g_.num_negatives);
            }
        });
    }

  private:
    float* scores_;
};

class Backward : Pass {
  public:
    Backward(const Group& group, const float* d_scores, const Gradients& gradients)
        : Pass(group, true), d_scores_(d_scores), out_(gradients), wide_(whole_vectors(group.width)),
          item_rows_(group.num_item * group.num_negatives * wide_) {
        for (int64_t x = 0; x < g_.num_item; ++x)
            for (int64_t k = 0; k < g_.num_negatives; ++k)
                std::copy_n(g_.items + (g_.chosen[k] * g_.num_item + x) * g_.width, g_.width,
                            item_rows_ + (x * g_.num_negatives + k) * wide_);
    }

    void run() {
        const int64_t threads = std::min(g_.threads, num_bands());
        std::vector<std::unique_ptr<Sums>> sums(threads);
        parallel_tiles(threads, threads, [&](int64_t first, int) {
            const WithoutDenormals zero;
            sums[first] = std::make_unique<Sums>(*this);
            Band band(*this, true);
            Buffer d_scores(band.row), change(std::max(pairs_, g_.num_hidden) * band.row), query(g_.num_query * wide_);
            for (int64_t number = first; number < num_bands(); number += threads) {
                band.first = number * band_;
                band.count = std::min(band_, g_.num_positions - band.first);
                forward(band);
                backward(band, d_scores.get(), change.get(), query.get(), *sums[first]);
            }
        });
        for (int64_t other = 1; other < threads; ++other) sums[0]->add(*sums[other]);
        finish(*sums[0]);
    }

  private:
    // What all positions add to. Of the weights a vector of partial sums per element.
    struct Sums {
        explicit Sums(const Backward& pass)
            : sizes{pass.g_.num_item * pass.g_.width * pass.padded_,
                    pass.pairs_ * pass.padded_,
                    pass.g_.num_hidden * pass.pairs_ * kLanes,
                    pass.g_.num_hidden * kLanes,
                    pass.pairs_ * pass.g_.num_hidden * kLanes,
                    pass.pairs_ * kLanes} {
            for (const int64_t size : sizes) parts.emplace_back(size);
        }
        void add(const Sums& other) {
            for (size_t part = 0; part < parts.size(); ++part)
                for (int64_t at = 0; at < sizes[part]; ++at) parts[part].get()[at] += other.parts[part].get()[at];
        }
        float* items() { return parts[0].get(); }       // (P_x, d, K')
        float* item_gate() { return parts[1].get(); }   // (P, K')
        float* hidden_weight() { return parts[2].get(); }
        float* hidden_bias() { return parts[3].get(); }
        float* out_weight() { return parts[4].get(); }
        float* out_bias() { return parts[5].get(); }
        std::vector<int64_t> sizes;
        std::vector<Buffer> parts;
    };

    void backward(Band& band, float* d_scores, float* change, float* query, Sums& sums) const {
        const int64_t row = band.row, used = band.count * padded_, hidden = g_.num_hidden;
        std::memset(d_scores, 0, sizeof(float) * row);
        for (int64_t s = 0; s < band.count; ++s)
            std::copy_n(d_scores_ + (band.first + s) * g_.num_negatives, g_.num_negatives, d_scores + s * padded_);
        // The weights w are a softmax of y = SiLU(z): ds / dy_p = w_p (c_p - s); ds / dc_p = w_p + the network's path.
        for (int64_t p = 0; p < pairs_; ++p) {
            Floats bias = load(sums.out_bias() + p * kLanes);
            for (int64_t at = p * row, end = at + used, score = 0; at < end; at += kLanes, score += kLanes) {
                const Floats weight = load(band.weights + at) * load(d_scores + score);
                const Floats d_gate = (load(band.cosines + at) - load(band.scores + score)) * weight * load(band.gate_slopes + at);
                store(band.weights + at, weight);
                store(band.gates + at, d_gate);
                bias += d_gate;
            }
            store(sums.out_bias() + p * kLanes, bias);
            for (int64_t s = 0; s < band.count; ++s) {
                const float of_query = g_.query_gate[(band.first + s) * pairs_ + p];
                Floats to_query = splat(0.0f);
                for (int64_t k = 0; k < padded_; k += kLanes) {
                    const Floats d_gate = load(band.gates + p * row + s * padded_ + k);
                    float* const to_item = sums.item_gate() + p * padded_ + k;
                    to_query += d_gate * load(item_gates_ + p * padded_ + k);
                    store(to_item, load(to_item) + d_gate * of_query);
                }
                out_.query_gate[(band.first + s) * pairs_ + p] = sum_of(to_query);
            }
        }
        // Rows of a band that is not full are shorter than W: what is behind them is zero in one factor.
        for (int64_t p = 0; p < pairs_; ++p) std::fill(band.gates + p * row + used, band.gates + (p + 1) * row, 0.0f);
        add_inner(sums.out_weight(), pairs_, hidden, band.gates.get(), band.hidden.get(), row);
        std::memset(change, 0, sizeof(float) * hidden * row);
        add_product(change, row, hidden, used, {g_.out_weight, 1, hidden}, band.gates.get(), row, pairs_);
        for (int64_t h = 0; h < hidden; ++h) {
            Floats bias = load(sums.hidden_bias() + h * kLanes);
            for (int64_t at = h * row; at < h * row + used; at += kLanes) {
                const Floats d_hidden = load(change + at) * load(band.slopes + at);
                store(change + at, d_hidden);
                bias += d_hidden;
            }
            store(sums.hidden_bias() + h * kLanes, bias);
        }
        const bool drops = g_.pair_dropout > 0;
        add_inner(sums.hidden_weight(), hidden, pairs_, change, drops ? band.read.get() : band.cosines.get(), row);
        if (drops) {
            std::memset(band.cosines.get(), 0, sizeof(float) * pairs_ * row);
            add_product(band.cosines.get(), row, pairs_, used, {g_.hidden_weight, 1, pairs_}, change, row, hidden);
            for (int64_t at = 0; at < pairs_ * row; at += kLanes)
                store(band.weights + at, load(band.weights + at) + load(band.cosines + at) * load(band.kept + at));
        } else {
            add_product(band.weights.get(), row, pairs_, used, {g_.hidden_weight, 1, pairs_}, change, row, hidden);
        }
        for (int64_t s = 0; s < band.count; ++s) {
            const int64_t position = band.first + s;
            const Scalars of_query{g_.query + position * g_.num_query * g_.width, 1, g_.width};
            std::memset(query, 0, sizeof(float) * g_.num_query * wide_);
            for (int64_t x = 0; x < g_.num_item; ++x) {
                const float* const d_cosines = band.weights + x * row + s * padded_;
                add_product(query, wide_, g_.num_query, wide_, {d_cosines, g_.num_item * row, 1},
                            item_rows_ + x * g_.num_negatives * wide_, wide_, g_.num_negatives);
                add_product(sums.items() + x * g_.width * padded_, padded_, g_.width, padded_, of_query, d_cosines,
                            g_.num_item * row, g_.num_query);
            }
            for (int64_t q = 0; q < g_.num_query; ++q)
                std::copy_n(query + q * wide_, g_.width, out_.query + (position * g_.num_query + q) * g_.width);
        }
    }

    void finish(Sums& sums) const {
        for (int64_t k = 0; k < g_.num_negatives; ++k) {
            for (int64_t at = 0; at < g_.num_item * g_.width; ++at)
                out_.items[k * g_.num_item * g_.width + at] = sums.items()[at * padded_ + k];
            for (int64_t p = 0; p < pairs_; ++p) out_.item_gate[k * pairs_ + p] = sums.item_gate()[p * padded_ + k];
        }
        const auto add = [](float* to, const float* from, int64_t count) {
            for (int64_t at = 0; at < count; ++at) to[at] += sum_of(load(from + at * kLanes));
        };
        add(out_.hidden_weight, sums.hidden_weight(), g_.num_hidden * pairs_);
        add(out_.hidden_bias, sums.hidden_bias(), g_.num_hidden);
        add(out_.out_weight, sums.out_weight(), pairs_ * g_.num_hidden);
        add(out_.out_bias, sums.out_bias(), pairs_);
    }

    const float* d_scores_;
    const Gradients& out_;
    int64_t wide_;
    Buffer item_rows_;  // (P_x, K, d')
};

}  // namespace

extern "C" {

// scores (R, K).
void freshet_mol_scores(const Group* group, float* scores) { Forward(*group, scores).run(); }

// d_scores (R, K): the loss's gradients with respect to the scores.
void freshet_mol_gradients(const Group* group, const float* d_scores, const Gradients* gradients) {
    Backward(*group, d_scores, *gradients).run();
}

}  // extern "C"
