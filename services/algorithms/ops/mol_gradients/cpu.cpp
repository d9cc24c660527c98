// Mixture-of-logits scores of a group of positions with the negatives that they share, and the gradients of a loss over
// them: the inner loop of training.
//
// A band of positions runs from cosines to scores while its activations are in the first two caches, and the backward
// pass computes them again: nothing of size R K G is ever stored. Pairs lie along the lanes, components and hidden units
// along the rows, so every product of matrices broadcasts a scalar of one factor and the softmax over components is a
// few vector operations. The backward pass gathers, of each position, the negatives whose gradient is not zero: its cost
// is theirs alone. Each thread takes every T-th band and has sums of its own, added up in order: the same threads give
// the same bits.
//
// Letters: R positions, K negatives, K' = K rounded up to whole vectors, M items, P_q, P_x components, P = P_q P_x,
// d component width, d' rounded up, G hidden width of the pair network, W = floats in a row of a band.
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

// out (rows, d') += a (rows, count) b (count, d'), where row k of b lies at b + chosen[k] * d'.
template <int M>
void add_chosen_rows(float* out, Scalars a, const float* b, const int32_t* chosen, int64_t count, int64_t wide) {
    for (int64_t n = 0; n < wide; n += kLanes) {
        Floats sums[M];
        for (int m = 0; m < M; ++m) sums[m] = load(out + m * wide + n);
        for (int64_t k = 0; k < count; ++k) {
            const Floats row = load(b + chosen[k] * wide + n);
            for (int m = 0; m < M; ++m) sums[m] += a.data[m * a.row + k * a.column] * row;
        }
        for (int m = 0; m < M; ++m) store(out + m * wide + n, sums[m]);
    }
}

// Row chosen[k] of out (., d') += the k-th column of a (rows, count), times b (rows, d').
template <int M>
void add_to_chosen_rows(float* out, Scalars a, const float* b, const int32_t* chosen, int64_t count, int64_t wide) {
    for (int64_t n = 0; n < wide; n += kLanes) {
        Floats rows[M];
        for (int m = 0; m < M; ++m) rows[m] = load(b + m * wide + n);
        for (int64_t k = 0; k < count; ++k) {
            float* const to = out + chosen[k] * wide + n;
            Floats sum = load(to);
            for (int m = 0; m < M; ++m) sum += a.data[m * a.row + k * a.column] * rows[m];
            store(to, sum);
        }
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
          row_(std::max(kBandFloats, padded_)),
          backward_(backward),
          items_(group.num_item * group.width * padded_),
          item_gates_(pairs_ * padded_) {
        for (int64_t k = 0; k < g_.num_negatives; ++k) {
            const float* const row = g_.items + g_.chosen[k] * g_.num_item * g_.width;
            for (int64_t at = 0; at < g_.num_item * g_.width; ++at) items_.get()[at * padded_ + k] = row[at];
            for (int64_t p = 0; p < pairs_; ++p) item_gates_.get()[p * padded_ + k] = g_.item_gate[g_.chosen[k] * pairs_ + p];
        }
    }

  protected:
    // A position's negatives in a band: `count` columns, whole vectors, from column `begin` on.
    struct Part {
        int64_t position, begin, count;
    };

    // What one band holds, rows of W floats, of which `used` count.
    struct Band {
        Band(const Pass& pass, bool backward)
            : row(pass.row_),
              negatives(row),
              cosines(pass.pairs_ * row),
              kept(pass.g_.pair_dropout > 0 ? pass.pairs_ * row : 0),
              read(pass.g_.pair_dropout > 0 ? pass.pairs_ * row : 0),
              hidden(pass.g_.num_hidden * row),
              slopes(backward ? pass.g_.num_hidden * row : 0),
              item_gates(pass.pairs_ * row),
              gates(pass.pairs_ * row),
              gate_slopes(backward ? pass.pairs_ * row : 0),
              weights(pass.pairs_ * row),
              scores(row) {}
        int64_t row, used = 0;
        std::vector<Part> parts;
        std::vector<int32_t> negatives;  // (W,)
        Buffer cosines, kept, read, hidden, slopes, item_gates, gates, gate_slopes, weights, scores;
    };

    // `columns` is room for P_x d W floats where not all negatives of a position are in the band, else null.
    void forward(Band& band, float* columns) const {
        const int64_t row = band.row, used = band.used;
        for (int64_t p = 0; p < pairs_; ++p) std::fill_n(band.cosines + p * row, used, 0.0f);
        for (const Part& part : band.parts) {
            const int32_t* const negatives = band.negatives.data() + part.begin;
            const float* items = items_.get();
            int64_t items_row = padded_;
            if (columns) {
                gather(columns, part.count, items_.get(), g_.num_item * g_.width, negatives, part.count);
                items = columns, items_row = part.count;
            }
            gather(band.item_gates + part.begin, row, item_gates_.get(), pairs_, negatives, part.count);
            const Scalars query{g_.query + part.position * g_.num_query * g_.width, g_.width, 1};
            for (int64_t x = 0; x < g_.num_item; ++x)
                add_product(band.cosines + x * row + part.begin, g_.num_item * row, g_.num_query, part.count, query,
                            items + x * g_.width * items_row, items_row, g_.width);
        }
        const float* const read = drop_pairs(band);
        for (int64_t h = 0; h < g_.num_hidden; ++h) std::fill_n(band.hidden + h * row, used, g_.hidden_bias[h]);
        add_product(band.hidden.get(), row, g_.num_hidden, used, {g_.hidden_weight, pairs_, 1}, read, row, pairs_);
        for (int64_t h = 0; h < g_.num_hidden; ++h)
            activate(band.hidden + h * row, backward_ ? band.slopes + h * row : nullptr, used);
        for (int64_t p = 0; p < pairs_; ++p)
            for (const Part& part : band.parts) {
                const float of_query = g_.query_gate[part.position * pairs_ + p];
                for (int64_t at = p * row + part.begin, end = at + part.count; at < end; at += kLanes)
                    store(band.gates + at, g_.out_bias[p] + of_query * load(band.item_gates + at));
            }
        add_product(band.gates.get(), row, pairs_, used, {g_.out_weight, g_.num_hidden, 1}, band.hidden.get(), row,
                    g_.num_hidden);
        for (int64_t p = 0; p < pairs_; ++p)
            activate(band.gates + p * row, backward_ ? band.gate_slopes + p * row : nullptr, used);
        for (const Part& part : band.parts)
            for (int64_t at = part.begin; at < part.begin + part.count; at += kLanes) weigh(band, part.position, at);
    }

    const Group& g_;
    int64_t pairs_, padded_, row_;
    bool backward_;
    Buffer items_;       // (P_x, d, K')
    Buffer item_gates_;  // (P, K')

  private:
    // out (rows, count) = the chosen columns of from (rows, K').
    void gather(float* out, int64_t out_row, const float* from, int64_t rows, const int32_t* chosen, int64_t count) const {
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t k = 0; k < count; ++k) out[row * out_row + k] = from[row * padded_ + chosen[k]];
    }

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
        for (const Part& part : band.parts)
            for (int64_t p = 0; p < pairs_; ++p)
                for (int64_t at = part.begin; at < part.begin + part.count; at += kLanes) {
                    const Floats factor =
                        kept(g_.seed, counter(part.position, p), band.negatives.data() + at, g_.pair_dropout);
                    store(band.kept + p * band.row + at, factor);
                    store(band.read + p * band.row + at, factor * load(band.cosines + p * band.row + at));
                }
        return band.read.get();
    }

    uint32_t counter(int64_t position, int64_t p) const { return static_cast<uint32_t>((position * pairs_ + p) * padded_); }

    // Pair weights and score of one vector of pairs.
    void weigh(Band& band, int64_t position, int64_t at) const {
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
                const Floats mask = kept(~g_.seed, counter(position, p), band.negatives.data() + at, g_.gate_dropout);
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
        const int64_t positions = row_ / padded_, bands = (g_.num_positions + positions - 1) / positions;
        const int64_t threads = std::min(g_.threads, bands);
        parallel_tiles(threads, threads, [&](int64_t first, int) {
            const WithoutDenormals zero;
            Band band(*this, false);
            for (int64_t number = first; number < bands; number += threads) {
                band.parts.clear();
                for (int64_t s = number * positions; s < std::min((number + 1) * positions, g_.num_positions); ++s) {
                    const int64_t begin = static_cast<int64_t>(band.parts.size()) * padded_;
                    band.parts.push_back({s, begin, padded_});
                    for (int64_t k = 0; k < padded_; ++k) band.negatives[begin + k] = static_cast<int32_t>(k);
                }
                band.used = static_cast<int64_t>(band.parts.size()) * padded_;
                forward(band, nullptr);
                for (const Part& part : band.parts)
                    std::copy_n(band.scores + part.begin, g_.num_negatives, scores_ + part.position * g_.num_negatives);
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
        divide();
        const int64_t bands = static_cast<int64_t>(firsts_.size()) - 1;
        const int64_t threads = std::max<int64_t>(1, std::min(g_.threads, bands));
        std::vector<std::unique_ptr<Sums>> sums(threads);
        parallel_tiles(threads, threads, [&](int64_t first, int) {
            const WithoutDenormals zero;
            sums[first] = std::make_unique<Sums>(*this);
            Band band(*this, true);
            Room room(*this);
            for (int64_t number = first; number < bands; number += threads) {
                fill(band, firsts_[number], firsts_[number + 1], room);
                forward(band, room.columns.get());
                backward(band, room, *sums[first]);
            }
        });
        for (int64_t other = 1; other < threads; ++other) sums[0]->add(*sums[other]);
        finish(*sums[0]);
    }

  private:
    // What all positions add to. Of the weights a vector of partial sums per element.
    struct Sums {
        explicit Sums(const Backward& pass)
            : sizes{pass.g_.num_item * pass.g_.num_negatives * pass.wide_,
                    pass.g_.num_negatives * pass.pairs_,
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
        float* items() { return parts[0].get(); }       // (P_x, K, d')
        float* item_gate() { return parts[1].get(); }   // (K, P)
        float* hidden_weight() { return parts[2].get(); }
        float* hidden_bias() { return parts[3].get(); }
        float* out_weight() { return parts[4].get(); }
        float* out_bias() { return parts[5].get(); }
        std::vector<int64_t> sizes;
        std::vector<Buffer> parts;
    };

    // A thread's own.
    struct Room {
        explicit Room(const Backward& pass)
            : columns(pass.g_.num_item * pass.g_.width * pass.padded_),
              d_scores(pass.row_),
              change(std::max(pass.pairs_, pass.g_.num_hidden) * pass.row_),
              query(pass.g_.num_query * pass.wide_),
              d_query(pass.g_.num_query * pass.wide_) {}
        Buffer columns, d_scores, change, query, d_query;
    };

    int64_t count_of(int64_t position) const {
        const float* const row = d_scores_ + position * g_.num_negatives;
        return whole_vectors(g_.num_negatives - std::count(row, row + g_.num_negatives, 0.0f));
    }

    // Bands of whole positions, each as full as W allows.
    void divide() {
        firsts_ = {0};
        int64_t used = 0;
        for (int64_t s = 0; s < g_.num_positions; ++s) {
            const int64_t count = count_of(s);
            if (used + count > row_) firsts_.push_back(s), used = 0;
            used += count;
        }
        firsts_.push_back(g_.num_positions);
    }

    // Positions first to last of the band: their negatives with a gradient, then as many of gradient zero as fill a vector.
    void fill(Band& band, int64_t first, int64_t last, Room& room) const {
        band.parts.clear();
        band.used = 0;
        for (int64_t s = first; s < last; ++s) {
            const float* const row = d_scores_ + s * g_.num_negatives;
            int64_t at = band.used;
            for (int64_t k = 0; k < g_.num_negatives; ++k)
                if (row[k] != 0.0f) {
                    band.negatives[at] = static_cast<int32_t>(k);
                    room.d_scores.get()[at++] = row[k];
                }
            const int64_t count = whole_vectors(at - band.used);
            for (; at < band.used + count; ++at) band.negatives[at] = 0, room.d_scores.get()[at] = 0.0f;
            band.parts.push_back({s, band.used, count});
            band.used += count;
        }
    }

    void backward(Band& band, Room& room, Sums& sums) const {
        const int64_t row = band.row, used = band.used, hidden = g_.num_hidden;
        const float* const d_scores = room.d_scores.get();
        float* const change = room.change.get();
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
            for (const Part& part : band.parts) {
                const float of_query = g_.query_gate[part.position * pairs_ + p];
                Floats to_query = splat(0.0f);
                const float* const d_gates = band.gates + p * row + part.begin;
                for (int64_t k = 0; k < part.count; k += kLanes)
                    to_query += load(d_gates + k) * load(band.item_gates + p * row + part.begin + k);
                for (int64_t k = 0; k < part.count; ++k)
                    sums.item_gate()[band.negatives[part.begin + k] * pairs_ + p] += d_gates[k] * of_query;
                out_.query_gate[part.position * pairs_ + p] = sum_of(to_query);
            }
        }
        add_inner(sums.out_weight(), pairs_, hidden, band.gates.get(), band.hidden.get(), row, used);
        for (int64_t h = 0; h < hidden; ++h) std::fill_n(change + h * row, used, 0.0f);
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
        const float* const read = drops ? band.read.get() : band.cosines.get();
        add_inner(sums.hidden_weight(), hidden, pairs_, change, read, row, used);
        if (drops) {
            for (int64_t p = 0; p < pairs_; ++p) std::fill_n(band.cosines + p * row, used, 0.0f);
            add_product(band.cosines.get(), row, pairs_, used, {g_.hidden_weight, 1, pairs_}, change, row, hidden);
            for (int64_t p = 0; p < pairs_; ++p)
                for (int64_t at = p * row; at < p * row + used; at += kLanes)
                    store(band.weights + at, load(band.weights + at) + load(band.cosines + at) * load(band.kept + at));
        } else {
            add_product(band.weights.get(), row, pairs_, used, {g_.hidden_weight, 1, pairs_}, change, row, hidden);
        }
        for (const Part& part : band.parts) to_components(band, part, room, sums);
    }

    // From the cosines' gradients, in band.weights, to those of one position's components and of its negatives'.
    void to_components(const Band& band, const Part& part, Room& room, Sums& sums) const {
        const int32_t* const negatives = band.negatives.data() + part.begin;
        for (int64_t q = 0; q < g_.num_query; ++q)
            std::copy_n(g_.query + (part.position * g_.num_query + q) * g_.width, g_.width, room.query + q * wide_);
        std::fill_n(room.d_query.get(), g_.num_query * wide_, 0.0f);
        for (int64_t x = 0; x < g_.num_item; ++x) {
            const float* const items = item_rows_ + x * g_.num_negatives * wide_;
            float* const d_items = sums.items() + x * g_.num_negatives * wide_;
            for (int64_t q = 0; q < g_.num_query;) {
                const int64_t row = g_.num_item * band.row;
                const Scalars d_cosines{band.weights + (q * g_.num_item + x) * band.row + part.begin, row, 1};
                float* const to = room.d_query + q * wide_;
                const float* const from = room.query + q * wide_;
                if (g_.num_query - q >= 4) {
                    add_chosen_rows<4>(to, d_cosines, items, negatives, part.count, wide_);
                    add_to_chosen_rows<4>(d_items, d_cosines, from, negatives, part.count, wide_);
                    q += 4;
                } else {
                    add_chosen_rows<1>(to, d_cosines, items, negatives, part.count, wide_);
                    add_to_chosen_rows<1>(d_items, d_cosines, from, negatives, part.count, wide_);
                    q += 1;
                }
            }
        }
        for (int64_t q = 0; q < g_.num_query; ++q)
            std::copy_n(room.d_query + q * wide_, g_.width, out_.query + (part.position * g_.num_query + q) * g_.width);
    }

    void finish(Sums& sums) const {
        for (int64_t k = 0; k < g_.num_negatives; ++k)
            for (int64_t x = 0; x < g_.num_item; ++x)
                std::copy_n(sums.items() + (x * g_.num_negatives + k) * wide_, g_.width,
                            out_.items + (k * g_.num_item + x) * g_.width);
        std::copy_n(sums.item_gate(), g_.num_negatives * pairs_, out_.item_gate);
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
    Buffer item_rows_;             // (P_x, K, d')
    std::vector<int64_t> firsts_;  // of each band, and R
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
