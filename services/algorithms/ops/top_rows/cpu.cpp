// The rows of a score matrix that may be among the top k, in one pass over the scores.

#include <cmath>
#include <cstdlib>
#include <limits>

#include "parallel.hpp"
#include "vector.hpp"

using namespace freshet;

namespace {

struct Candidate {
    int64_t row;
    float score;
};

// Candidates of one query so far, and the score that a row must reach to become one. That score only ever rises: at
// most to what the k best so far demand, which the k best of all demand as well.
class Candidates {
public:
    Candidates(int64_t k, double slack) : k_(k), slack_(slack), prune_at_(std::max<int64_t>(4 * k, 1024)) {}

    float reach() const { return reach_; }
    const std::vector<Candidate>& found() const { return found_; }

    void add(int64_t row, float score) {
        found_.push_back({row, score});
        if (static_cast<int64_t>(found_.size()) >= prune_at_) {
            prune();
            prune_at_ = std::max<int64_t>(prune_at_, 2 * found_.size());
        }
    }

    void prune() {
        if (static_cast<int64_t>(found_.size()) < k_) return;
        scores_.clear();
        for (const auto& candidate : found_) scores_.push_back(candidate.score);
        std::nth_element(scores_.begin(), scores_.begin() + (k_ - 1), scores_.end(), std::greater<float>());
        // One float lower than need be: so that rounding here cannot leave a row out.
        const float lowest = static_cast<float>(scores_[k_ - 1] - slack_);
        reach_ = std::max(reach_, std::nextafter(lowest, -std::numeric_limits<float>::infinity()));
        std::erase_if(found_, [&](const Candidate& candidate) { return candidate.score < reach_; });
    }

private:
    int64_t k_;
    double slack_;
    int64_t prune_at_;
    float reach_ = std::numeric_limits<float>::lowest();  // -inf is never a candidate
    std::vector<Candidate> found_;
    std::vector<float> scores_;
};

void scan(const float* scores, int64_t size, const uint8_t* allowed, Candidates& candidates) {
    const auto take = [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row)
            if (scores[row] >= candidates.reach() && (!allowed || allowed[row])) candidates.add(row, scores[row]);
    };
    constexpr int64_t kStep = 4 * kLanes;
    int64_t row = 0;
    for (; row + kStep <= size; row += kStep) {
        const Floats a = load(scores + row), b = load(scores + row + kLanes);
        const Floats c = load(scores + row + 2 * kLanes), d = load(scores + row + 3 * kLanes);
        const Ints hits = max(max(a, b), max(c, d)) >= splat(candidates.reach());
        uint64_t words[sizeof hits / 8], any = 0;
        std::memcpy(words, &hits, sizeof hits);
        for (const uint64_t word : words) any |= word;
        if (any) take(row, row + kStep);
    }
    take(row, size);
}

}  // namespace

extern "C" {

// Rows of scores (B, X) within slack[b] of the k-th best allowed one, in order, and how many: counts (B,). `allowed` is
// null, or one byte per row with `mask_stride` bytes between queries. Returns null where memory is short; otherwise the
// rows of all queries one after the other, to be given back to freshet_free.
int64_t* freshet_top_rows(const float* scores, int64_t num_queries, int64_t num_items, int64_t k, const double* slack,
                          const uint8_t* allowed, int64_t mask_stride, int64_t threads, int64_t* counts) {
    std::vector<std::vector<Candidate>> found(num_queries);
    parallel_tiles(num_queries, static_cast<int>(threads), [&](int64_t query, int) {
        Candidates candidates(k, slack[query]);
        scan(scores + query * num_items, num_items, allowed ? allowed + query * mask_stride : nullptr, candidates);
        candidates.prune();
        found[query] = candidates.found();
    });
    int64_t total = 0;
    for (int64_t query = 0; query < num_queries; ++query) total += counts[query] = found[query].size();
    auto* rows = static_cast<int64_t*>(std::malloc(std::max<int64_t>(total, 1) * sizeof(int64_t)));
    if (!rows) return nullptr;
    int64_t* to = rows;
    for (const auto& candidates : found)
        for (const auto& candidate : candidates) *to++ = candidate.row;
    return rows;
}

void freshet_free(void* memory) { std::free(memory); }
}
