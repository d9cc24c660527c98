// Mixture-of-Logits scores on the CPU, fused: no array of (B, X, P) ever exists, only one tile's.
//
// s = sum_p pi_p c_p, pi = softmax(SiLU(q_p x_p + (W2 SiLU(W1 c + b1) + b2)_p)). Items lie across the lanes: a tile of
// up to 3 vectors of items is transposed once into the cache and then scored for every query. For each query the three
// matrix products (cosines, W1, W2) run in a register-blocked kernel, whose results go through SiLU before they leave
// the registers. Items stay as they are stored, row by row: no second copy, and gathering rows is the same code.
//
// Letters: B queries, X items, P_q, P_x query and item components, P = P_q * P_x (pair p = p_q * P_x + p_x),
// d component width, G gate hidden width.

#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include "parallel.hpp"
#include "vector.hpp"

using namespace freshet;

namespace {

// Registers: kRows x 3 sums, 3 inputs and one weight fill 28 of 32 (AVX-512, aarch64) or 16 of 16 (other x86).
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRows = 8;
#else
constexpr int kRows = 4;
#endif

template <typename Real>
struct Lanes;
template <>
struct Lanes<float> {
    using Vector = Floats;
    static constexpr int kCount = kLanes;
    static constexpr int kMostVectors = 3;
};
template <>
struct Lanes<double> {
    using Vector = Doubles;
    static constexpr int kCount = kLanes / 2;
    static constexpr int kMostVectors = 2;  // together one vector of floats: the smallest tile
};

template <typename Real>
constexpr int kTileItems = Lanes<Real>::kCount * Lanes<Real>::kMostVectors;

template <typename Real>
inline auto load_as(const Real* from) {
    return load(from);
}

// Stored float32 values for a product in double precision.
template <typename Real, typename = std::enable_if_t<std::is_same_v<Real, double>>>
inline Doubles load_as(const float* from) {
    Doubles value;
    for (int lane = 0; lane < kLanes / 2; ++lane) value[lane] = from[lane];
    return value;
}

// Calls body(integral_constant<R>, first row) for blocks of kRows rows and then smaller ones: how weights are packed.
template <typename Body>
inline void for_row_blocks(int64_t rows, const Body& body) {
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) body(std::integral_constant<int, kRows>{}, row);
    if constexpr (kRows > 4) {
        if (rows - row >= 4) {
            body(std::integral_constant<int, 4>{}, row);
            row += 4;
        }
    }
    if (rows - row >= 2) {
        body(std::integral_constant<int, 2>{}, row);
        row += 2;
    }
    if (rows - row >= 1) body(std::integral_constant<int, 1>{}, row);
}

// (rows, depth) -> per block of R rows (depth, R): the order in which `product` reads.
void pack(const float* weights, int64_t rows, int64_t depth, float* packed) {
    for_row_blocks(rows, [&](auto size, int64_t first) {
        float* to = packed + first * depth;
        for (int64_t k = 0; k < depth; ++k)
            for (int r = 0; r < size; ++r) *to++ = weights[(first + r) * depth + k];
    });
}

// out[r] = bias[r] + sum_k weights[k][r] * in[k] for one block of R rows: the loop that most of the time goes to. It is
// a function of its own, because inlined beside SiLU the compiler keeps SiLU's constants in registers and the sums in
// memory (8x8x32, G 128, B 32: 0.41 instead of 0.28 us per pair; and 0.24 since it starts from the bias instead of
// from what `out` held).
template <typename Real, int R, int V, typename In>
__attribute__((noinline)) void product(const Real* weights, const Real* bias, int64_t depth, const In* in, Real* out,
                                       int64_t out_stride) {
    using Vector = typename Lanes<Real>::Vector;
    constexpr int kCount = Lanes<Real>::kCount;
    Vector sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = splat(bias[r]);
    for (int64_t k = 0; k < depth; ++k, weights += R, in += V * kCount) {
        Vector x[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) x[v] = load_as<Real>(in + v * kCount);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vector weight = splat(weights[r]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] += weight * x[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(out + r * out_stride + v * kCount, sums[r][v]);
}

// out (rows, V vectors) = bias + weights (rows, depth), packed, times in (depth, V vectors); `meanwhile` runs once per
// block.
template <typename Real, int V, typename In, typename Meanwhile>
void product(const Real* weights, const Real* bias, int64_t rows, int64_t depth, const In* in, Real* out,
             int64_t out_stride, Meanwhile&& meanwhile) {
    for_row_blocks(rows, [&](auto size, int64_t first) {
        meanwhile();
        product<Real, decltype(size)::value, V>(weights + first * depth, bias + first, depth, in,
                                                out + first * out_stride, out_stride);
    });
}

template <typename Real>
__attribute__((noinline)) void silu_in_place(Real* values, int64_t size) {
    for (int64_t i = 0; i < size; i += Lanes<Real>::kCount) store(values + i, silu(load(values + i)));
}

}  // namespace

extern "C" {

// One call's inputs, as `_Problem` in scorer.py declares them. Arrays are C-contiguous float32; gates may be null.
struct FreshetMolProblem {
    const float* query_components;  // (B, P_q, d)
    const float* query_gate;        // (B, P)
    const float* item_components;   // (X, P_x, d)
    const float* item_gate;         // (X, P)
    const float* hidden_weight;     // (G, P), packed
    const float* hidden_bias;       // (G,)
    const float* out_weight;        // (P, G), packed
    const float* out_bias;          // (P,)
    int64_t num_queries, num_items, query_parts, item_parts, width, hidden_width;
    int64_t threads;
};
}

namespace {

using Problem = FreshetMolProblem;

int64_t pairs(const Problem& problem) { return problem.query_parts * problem.item_parts; }

using Quad = float __attribute__((vector_size(16)));

template <int A, int B, int C, int D, std::size_t... I>
constexpr Ints quad_mask(std::index_sequence<I...>) {
    constexpr int kChosen[] = {A, B, C, D};
    // Within each group of four lanes: 0-3 choose from the first vector, 4-7 from the second.
    return Ints{(kChosen[I % 4] < 4 ? static_cast<int>(I / 4 * 4) + kChosen[I % 4]
                                    : kLanes + static_cast<int>(I / 4 * 4) + kChosen[I % 4] - 4)...};
}

template <int A, int B, int C, int D>
inline Floats shuffle_quads(Floats x, Floats y) {
    return __builtin_shuffle(x, y, quad_mask<A, B, C, D>(std::make_index_sequence<kLanes>{}));
}

inline Quad load_quad(const float* from) {
    Quad value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// Four values at `column` of rows first, first + 4, first + 8, ...: one group of four lanes per row.
inline Floats load_quads(const float* const* rows, int first, int64_t column) {
#if defined(__AVX512F__)
    const auto low = __builtin_shufflevector(load_quad(rows[first] + column), load_quad(rows[first + 4] + column), 0, 1,
                                             2, 3, 4, 5, 6, 7);
    const auto high = __builtin_shufflevector(load_quad(rows[first + 8] + column), load_quad(rows[first + 12] + column),
                                              0, 1, 2, 3, 4, 5, 6, 7);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX__)
    return __builtin_shufflevector(load_quad(rows[first] + column), load_quad(rows[first + 4] + column), 0, 1, 2, 3, 4,
                                   5, 6, 7);
#else
    return load_quad(rows[first] + column);
#endif
}

// kLanes rows of `columns` values -> `to` (columns, stride), rows across the lanes.
void transpose(const float* const* rows, int64_t columns, float* to, int64_t stride) {
    int64_t column = 0;
    for (; column + 4 <= columns; column += 4) {
        const Floats a = load_quads(rows, 0, column), b = load_quads(rows, 1, column);
        const Floats c = load_quads(rows, 2, column), d = load_quads(rows, 3, column);
        const Floats ab_low = shuffle_quads<0, 4, 1, 5>(a, b), ab_high = shuffle_quads<2, 6, 3, 7>(a, b);
        const Floats cd_low = shuffle_quads<0, 4, 1, 5>(c, d), cd_high = shuffle_quads<2, 6, 3, 7>(c, d);
        float* out = to + column * stride;
        store(out, shuffle_quads<0, 1, 4, 5>(ab_low, cd_low));
        store(out + stride, shuffle_quads<2, 3, 6, 7>(ab_low, cd_low));
        store(out + 2 * stride, shuffle_quads<0, 1, 4, 5>(ab_high, cd_high));
        store(out + 3 * stride, shuffle_quads<2, 3, 6, 7>(ab_high, cd_high));
    }
    for (; column < columns; ++column)
        for (int lane = 0; lane < kLanes; ++lane) to[column * stride + lane] = rows[lane][column];
}

// A call's queries and the gate's weights in the order and the precision that `product` reads.
template <typename Real>
class Packed {
public:
    explicit Packed(const Problem& problem)
        : query_size_(problem.query_parts * problem.width), zeros_(problem.query_parts) {
        std::vector<float> packed(problem.num_queries * query_size_);
        for (int64_t query = 0; query < problem.num_queries; ++query)
            pack(problem.query_components + query * query_size_, problem.query_parts, problem.width,
                 packed.data() + query * query_size_);
        const int64_t size = problem.hidden_weight ? pairs(problem) * problem.hidden_width : 0;
        if constexpr (std::is_same_v<Real, float>) {
            queries_ = std::move(packed);
        } else {
            queries_.assign(packed.begin(), packed.end());
        }
        hidden_weight = in_precision(problem.hidden_weight, size, hidden_weight_);
        hidden_bias = in_precision(problem.hidden_bias, problem.hidden_width, hidden_bias_);
        out_weight = in_precision(problem.out_weight, size, out_weight_);
        out_bias = in_precision(problem.out_bias, pairs(problem), out_bias_);
    }

    const Real* query(int64_t query) const { return queries_.data() + query * query_size_; }

    const Real* no_bias() const { return zeros_.data(); }

    // Null without a pair gate.
    const Real *hidden_weight, *hidden_bias, *out_weight, *out_bias;

private:
    static const Real* in_precision(const float* values, int64_t size, std::vector<Real>& copy) {
        if constexpr (std::is_same_v<Real, float>) return values;
        if (!values) return nullptr;
        copy.assign(values, values + size);
        return copy.data();
    }

    int64_t query_size_;
    std::vector<Real> zeros_, queries_, hidden_weight_, hidden_bias_, out_weight_, out_bias_;
};

// A worker's buffers: one tile of items (values, stride), and for one query its cosines, hidden layer and logits.
template <typename Real>
class Scratch {
public:
    explicit Scratch(const Problem& problem)
        : tile_size_((problem.item_parts * problem.width + pairs(problem)) * kTileItems<Real>),
          pair_size_(pairs(problem) * kTileItems<Real>),
          memory_(static_cast<char*>(::operator new(
              tile_size_ * sizeof(float) + (2 * pair_size_ + problem.hidden_width * kTileItems<Real>) * sizeof(Real),
              std::align_val_t{64}))) {}
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { ::operator delete(memory_, std::align_val_t{64}); }

    float* tile() const { return reinterpret_cast<float*>(memory_); }
    Real* cosines() const { return reinterpret_cast<Real*>(memory_ + tile_size_ * sizeof(float)); }
    Real* logits() const { return cosines() + pair_size_; }
    Real* hidden() const { return logits() + pair_size_; }

private:
    int64_t tile_size_, pair_size_;
    char* memory_;
};

// Items rows[0..count), or first..first + count where there are no rows.
struct Chosen {
    const int64_t* rows;
    int64_t first, count;

    int64_t operator[](int64_t place) const { return rows ? rows[place] : first + place; }

    Chosen part(int64_t begin, int64_t most) const {
        return {rows ? rows + begin : nullptr, first + begin, std::min(most, count - begin)};
    }
};

// Brings the next tile's items into the cache, a few at a time, while this tile is being scored: with one query there
// is too little work per item to hide the memory's latency otherwise (8x8x32, G 128, X 200,000: 0.43 against 0.37 us
// per pair). Rows gathered at random from as many gain nothing by it (0.55 us either way), nor does any finer pace.
class Prefetch {
public:
    Prefetch(const Problem& problem, Chosen items)
        : problem_(problem),
          items_(items),
          values_(problem.item_parts * problem.width),
          items_per_step_(1 + items.count * kRows / (problem.hidden_width + pairs(problem))) {}

    void operator()() {
        const int64_t end = std::min(next_ + items_per_step_, items_.count);
        for (; next_ < end; ++next_) {
            const int64_t row = items_[next_];
            touch(problem_.item_components + row * values_, values_);
            if (problem_.item_gate) touch(problem_.item_gate + row * pairs(problem_), pairs(problem_));
        }
    }

private:
    static void touch(const float* from, int64_t size) {
        for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(from + i, 0, 2);
    }

    const Problem& problem_;
    Chosen items_;
    int64_t values_, items_per_step_, next_ = 0;
};

// The items into the tile, across its lanes; the last one fills the lanes beyond.
void load_tile(const Problem& problem, Chosen items, int64_t stride, float* tile) {
    const int64_t values = problem.item_parts * problem.width;
    for (int64_t lane = 0; lane < stride; lane += kLanes) {
        const float* components[kLanes];
        const float* gates[kLanes];
        for (int i = 0; i < kLanes; ++i) {
            const int64_t row = items[std::min(lane + i, items.count - 1)];
            components[i] = problem.item_components + row * values;
            gates[i] = problem.item_gate + row * pairs(problem);
        }
        transpose(components, values, tile + lane, stride);
        if (problem.item_gate) transpose(gates, pairs(problem), tile + values * stride + lane, stride);
    }
}

// scores = sum_p softmax_p(logits) cosines; the largest logit is taken off first, so nothing overflows.
template <typename Real, int V>
__attribute__((noinline)) void softmax_mean(const Real* logits, const Real* cosines, int64_t num_pairs, Real* scores) {
    using Vector = typename Lanes<Real>::Vector;
    constexpr int kCount = Lanes<Real>::kCount;
    Vector largest[V], total[V] = {}, weighted[V] = {};
    for (int v = 0; v < V; ++v) largest[v] = load(logits + v * kCount);
    for (int64_t p = 1; p < num_pairs; ++p)
        for (int v = 0; v < V; ++v) largest[v] = max(largest[v], load(logits + (p * V + v) * kCount));
    for (int64_t p = 0; p < num_pairs; ++p) {
        for (int v = 0; v < V; ++v) {
            const Vector weight = exp_not_positive(load(logits + (p * V + v) * kCount) - largest[v]);
            total[v] += weight;
            weighted[v] += weight * load(cosines + (p * V + v) * kCount);
        }
    }
    for (int v = 0; v < V; ++v) store(scores + v * kCount, weighted[v] / total[v]);
}

// Scores of one query for the V vectors of items in the tile: (V * lanes,).
template <typename Real, int V>
void score(const Problem& problem, const Packed<Real>& packed, int64_t query, const Scratch<Real>& scratch,
           Prefetch& prefetch, Real* scores) {
    using Vector = typename Lanes<Real>::Vector;
    constexpr int kCount = Lanes<Real>::kCount;
    constexpr int64_t kStride = V * kCount;
    const int64_t width = problem.width, item_parts = problem.item_parts;
    const int64_t num_pairs = pairs(problem), hidden_width = problem.hidden_width;
    Real* const cosines = scratch.cosines();
    Real* const hidden = scratch.hidden();
    Real* const logits = scratch.logits();

    for (int64_t part = 0; part < item_parts; ++part)
        product<Real, V>(packed.query(query), packed.no_bias(), problem.query_parts, width,
                         scratch.tile() + part * width * kStride, cosines + part * kStride, item_parts * kStride,
                         [] {});
    if (packed.hidden_weight) {
        product<Real, V>(packed.hidden_weight, packed.hidden_bias, hidden_width, num_pairs, cosines, hidden, kStride,
                         prefetch);
        silu_in_place(hidden, hidden_width * kStride);
        product<Real, V>(packed.out_weight, packed.out_bias, num_pairs, hidden_width, hidden, logits, kStride,
                         prefetch);
    } else {
        std::fill_n(logits, num_pairs * kStride, Real{0});
    }
    if (problem.query_gate) {
        const float* query_gate = problem.query_gate + query * num_pairs;
        const float* item_gate = scratch.tile() + item_parts * width * kStride;
        for (int64_t p = 0; p < num_pairs; ++p) {
            const Vector gate = splat(static_cast<Real>(query_gate[p]));
            for (int64_t i = p * kStride; i < (p + 1) * kStride; i += kCount)
                store(logits + i, load(logits + i) + gate * load_as<Real>(item_gate + i));
        }
    }
    silu_in_place(logits, num_pairs * kStride);
    softmax_mean<Real, V>(logits, cosines, num_pairs, scores);
}

// Loads up to kTileItems items and scores them for queries [begin, end): query b's scores go to out + (b - begin) * X.
template <typename Real, int V>
void score_tile(const Problem& problem, const Packed<Real>& packed, int64_t begin, int64_t end, Chosen items,
                Chosen next_items, const Scratch<Real>& scratch, Real* out) {
    constexpr int64_t kSmaller = (V - 1) * Lanes<Real>::kCount;
    if constexpr (V > 1 && kSmaller % kLanes == 0) {
        if (items.count <= kSmaller)
            return score_tile<Real, V - 1>(problem, packed, begin, end, items, next_items, scratch, out);
    }
    constexpr int64_t kStride = V * Lanes<Real>::kCount;
    load_tile(problem, items, kStride, scratch.tile());
    Prefetch prefetch(problem, next_items);
    for (int64_t query = begin; query < end; ++query, out += problem.num_items) {
        alignas(64) Real scores[kStride];
        score<Real, V>(problem, packed, query, scratch, prefetch, scores);
        std::memcpy(out, scores, items.count * sizeof(Real));
    }
}

// How many tiles a worker takes in a row: enough to know which items come next, few enough to share the work evenly.
int64_t tiles_per_run(int64_t tiles, int64_t threads) { return std::clamp<int64_t>(tiles / (8 * threads), 1, 16); }

template <typename Real>
void score_run(const Problem& problem, const Packed<Real>& packed, int64_t begin, int64_t end, Chosen items,
               const Scratch<Real>& scratch, Real* out) {
    constexpr int64_t kTile = kTileItems<Real>;
    for (int64_t place = 0; place < items.count; place += kTile) {
        const int64_t next = std::min(place + kTile, items.count);
        score_tile<Real, Lanes<Real>::kMostVectors>(problem, packed, begin, end, items.part(place, kTile),
                                                    items.part(next, kTile), scratch, out + place);
    }
}

// One worker's scratch each, made by the worker that first needs it.
template <typename Real>
class Scratches {
public:
    explicit Scratches(const Problem& problem) : problem_(problem), of_worker_(problem.threads) {}

    const Scratch<Real>& operator[](int worker) {
        auto& scratch = of_worker_[worker];
        if (!scratch) scratch = std::make_unique<Scratch<Real>>(problem_);
        return *scratch;
    }

private:
    const Problem& problem_;
    std::vector<std::unique_ptr<Scratch<Real>>> of_worker_;
};

// Scores of rows[offsets[b]..offsets[b + 1]) for each query b, to the same places of `out`.
template <typename Real>
void scores_at(const Problem& problem, const int64_t* rows, const int64_t* offsets, Real* out) {
    constexpr int64_t kTile = kTileItems<Real>;
    const int64_t most = offsets[problem.num_queries] / kTile;
    const int64_t run_items = kTile * tiles_per_run(most, problem.threads);
    const Packed<Real> packed(problem);
    std::vector<std::pair<int64_t, int64_t>> runs;  // query, first place
    for (int64_t query = 0; query < problem.num_queries; ++query)
        for (int64_t place = offsets[query]; place < offsets[query + 1]; place += run_items)
            runs.emplace_back(query, place);
    Scratches<Real> scratches(problem);
    parallel_tiles(runs.size(), problem.threads, [&](int64_t run, int worker) {
        const auto [query, place] = runs[run];
        const Chosen items{rows + place, 0, std::min(run_items, offsets[query + 1] - place)};
        score_run(problem, packed, query, query + 1, items, scratches[worker], out + place);
    });
}

}  // namespace

extern "C" {

// Bring weights (rows, depth) into the order that the kernels of this instruction set read.
void freshet_pack(const float* weights, int64_t rows, int64_t depth, float* packed) {
    pack(weights, rows, depth, packed);
}

// Score every item for every query: out (B, X).
void freshet_mol_scores(const FreshetMolProblem* problem, float* out) {
    constexpr int64_t kTile = kTileItems<float>;
    const int64_t run_items = kTile * tiles_per_run(problem->num_items / kTile, problem->threads);
    const Packed<float> packed(*problem);
    Scratches<float> scratches(*problem);
    parallel_tiles((problem->num_items + run_items - 1) / run_items, problem->threads, [&](int64_t run, int worker) {
        const int64_t first = run * run_items;
        const Chosen items{nullptr, first, std::min(run_items, problem->num_items - first)};
        score_run(*problem, packed, 0, problem->num_queries, items, scratches[worker], out + first);
    });
}

// Score item rows[offsets[b]..offsets[b + 1]) for each query b: out, as long as rows.
void freshet_mol_scores_at(const FreshetMolProblem* problem, const int64_t* rows, const int64_t* offsets, float* out) {
    scores_at(*problem, rows, offsets, out);
}

void freshet_mol_scores_at_float64(const FreshetMolProblem* problem, const int64_t* rows, const int64_t* offsets,
                                   double* out) {
    scores_at(*problem, rows, offsets, out);
}

// The largest norm over all items of each of the P_x components, summed in float64: norms (P_x,).
void freshet_largest_norms(const float* components, int64_t num_items, int64_t parts, int64_t width, int64_t threads,
                           double* norms) {
    constexpr int64_t kItems = 4096;
    std::vector<double> squares(threads * parts, 0.0);
    parallel_tiles((num_items + kItems - 1) / kItems, static_cast<int>(threads), [&](int64_t tile, int worker) {
        const int64_t end = std::min(num_items, (tile + 1) * kItems);
        for (int64_t row = tile * kItems * parts; row < end * parts; ++row) {
            const float* values = components + row * width;
            Doubles sums = {};
            double square = 0;
            int64_t i = 0;
            for (; i + kLanes / 2 <= width; i += kLanes / 2) {
                const Doubles value = load_as<double>(values + i);
                sums += value * value;
            }
            for (; i < width; ++i) square += static_cast<double>(values[i]) * values[i];
            for (int lane = 0; lane < kLanes / 2; ++lane) square += sums[lane];
            double& largest = squares[worker * parts + row % parts];
            largest = std::max(largest, square);
        }
    });
    for (int64_t part = 0; part < parts; ++part) {
        double largest = 0;
        for (int64_t worker = 0; worker < threads; ++worker)
            largest = std::max(largest, squares[worker * parts + part]);
        norms[part] = std::sqrt(largest);
    }
}

// out[i] = exp(in[i]) for in <= 0 (function 0), saturated exp (1) or SiLU (2): so that tests reach vector.hpp.
void freshet_elementwise(int function, const float* in, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i += kLanes) {
        float lanes[kLanes] = {};
        const int64_t count = std::min<int64_t>(kLanes, size - i);
        std::memcpy(lanes, in + i, 4 * count);
        const Floats x = load(lanes);
        store(lanes, function == 0 ? exp_not_positive(x) : function == 1 ? exp_saturated(x) : silu(x));
        std::memcpy(out + i, lanes, 4 * count);
    }
}
}
