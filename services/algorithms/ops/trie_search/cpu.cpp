// The best identifiers of tries in one native call, without arrays of all children.
//
// A node's table holds, for each set of as many positions as the node is deep, the best that its tokens gain there.
// Children are met by their tokens' places in a bit per token of the vocabulary; each costs s operations for its gain
// and s for its bound, and only the `beams` of a level that go on get a table. Sums and maxima alone, always in the
// same order, so every build and NumPy agree to the bit. Mirrored by services/algorithms/ops/trie_search/__init__.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

struct FreshetTrie {
    int64_t num_root_words;
    const int32_t *tokens, *children, *ends, *identifiers;
    const uint64_t* root_bits;  // which tokens the root's children have
    const int32_t* root_ranks;  // and per word how many there are before it
};

struct FreshetTrieQuestion {
    int64_t num_tokens, positions, beams, results, in_order;
    const int32_t* tokens;  // (U,) rising
    const float* gains;     // (U, s)
    int64_t num_identifiers;
    const uint8_t* deleted;  // (num_identifiers,)
    // Where `allowed` is not null: the items of identifiers, and which may be answered with.
    int64_t first_added, num_added, num_items;
    const int32_t* rows;
    const int64_t* offsets;
    const int32_t* added_rows;
    const int64_t* added_offsets;
    const uint8_t* allowed;
    int32_t* out_identifiers;  // (K,)
    float* out_gains;          // (K,)
    float* out_bound;
};

namespace {

// Positions in whole vectors of eight; those beyond s add nothing and are never free.
using Eight = float __attribute__((vector_size(32), aligned(4)));
constexpr int kEight = 8, kMostPadded = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Answer {
    float gain;
    int32_t identifier;
};

inline Eight larger(Eight a, Eight b) { return a > b ? a : b; }

// The largest of a[t] + b[t], t below 8 or 16.
inline float largest_sum(const float* a, const float* b, int padded) {
    Eight best = *(const Eight*)a + *(const Eight*)b;
    if (padded > kEight) best = larger(best, *(const Eight*)(a + kEight) + *(const Eight*)(b + kEight));
    using Turn = int32_t __attribute__((vector_size(32)));
    best = larger(best, __builtin_shuffle(best, Turn{4, 5, 6, 7, 0, 1, 2, 3}));
    best = larger(best, __builtin_shuffle(best, Turn{2, 3, 0, 1, 6, 7, 4, 5}));
    best = larger(best, __builtin_shuffle(best, Turn{1, 0, 3, 2, 5, 4, 7, 6}));
    return best[0];
}

inline bool better(const Answer& a, const Answer& b) {
    return a.gain > b.gain || (a.gain == b.gain && a.identifier < b.identifier);
}

// Which tokens were scored and where: a bit per token, and per word of bits the place of its first one. A thread keeps
// the words between calls and leaves them clear.
struct Places {
    std::vector<uint64_t> bits;
    std::vector<int32_t> firsts;

    void set(const int32_t* tokens, int64_t count) {
        const int64_t words = count ? (tokens[count - 1] >> 6) + 1 : 0;
        if ((int64_t)bits.size() < words) {
            bits.resize(words, 0);
            firsts.resize(words);
        }
        for (int64_t u = 0; u < count; ++u) {
            const int32_t word = tokens[u] >> 6;
            if (!bits[word]) firsts[word] = (int32_t)u;
            bits[word] |= 1ull << (tokens[u] & 63);
        }
    }

    void clear(const int32_t* tokens, int64_t count) {
        for (int64_t u = 0; u < count; ++u) bits[tokens[u] >> 6] = 0;
    }

    int32_t of(int32_t token) const {
        const uint64_t word = (size_t)(token >> 6) < bits.size() ? bits[token >> 6] : 0;
        const uint64_t bit = 1ull << (token & 63);
        return word & bit ? firsts[token >> 6] + __builtin_popcountll(word & (bit - 1)) : -1;
    }
};

// The sets of used positions of every level, and from which smaller set and position each comes about.
struct Levels {
    struct Step {
        int32_t source, position;
    };
    std::vector<std::vector<int32_t>> masks;
    std::vector<std::vector<std::vector<Step>>> steps;  // of level n: how its sets come from those of n - 1

    Levels(int positions, bool in_order) : masks(positions + 1), steps(positions + 1) {
        std::vector<int32_t> place(1 << positions, -1);
        for (int mask = 0; mask < 1 << positions; ++mask) {
            const int level = __builtin_popcount(mask);
            if (in_order && mask != (1 << level) - 1) continue;
            place[mask] = (int32_t)masks[level].size();
            masks[level].push_back(mask);
            std::vector<Step> ways;
            for (int t = 0; t < positions; ++t) {
                if (mask >> t & 1 && place[mask ^ 1 << t] >= 0) ways.push_back({place[mask ^ 1 << t], t});
            }
            steps[level].push_back(std::move(ways));
        }
    }
};

struct Kept {
    int32_t part, node;
};

struct Candidate {
    float bound;
    int32_t part, node, parent, place;
    int64_t order;
};

struct Search {
    const FreshetTrie* parts;
    int64_t num_parts;
    const FreshetTrieQuestion& ask;
    const Places& places;
    int positions, padded;
    float largest[kMostPadded] = {};
    std::vector<float>& gains;  // (U, 8 or 16): what a token adds at a position
    std::vector<float> rest;
    std::vector<Answer> best;  // a heap, the worst on top
    std::vector<Candidate> candidates;
    std::vector<Kept> kept;
    std::vector<float> table, grown;
    int64_t part_begin;      // where the candidates of the part at hand begin
    int64_t met;             // children of this level so far, which settles ties
    float enough, left_out;  // as many as go on reach it; the largest bound of those that do not
    float bound = -kInfinity, slack;

    Search(const FreshetTrie* tries, int64_t count, const FreshetTrieQuestion& question, const Places& at,
           std::vector<float>& room)
        : parts(tries), num_parts(count), ask(question), places(at), positions((int)question.positions),
          padded(question.positions > kEight ? kMostPadded : kEight), gains(room) {
        float magnitude = 0;
        if ((int64_t)gains.size() < ask.num_tokens * padded) gains.resize(ask.num_tokens * padded);
        Eight highest[2] = {}, lowest[2] = {};
        for (int64_t u = 0; u < ask.num_tokens; ++u) {
            float* row = gains.data() + u * padded;
            for (int t = 0; t < positions; ++t) row[t] = ask.gains[u * positions + t];
            for (int t = positions; t < padded; ++t) row[t] = 0;
            for (int part = 0; part < padded / kEight; ++part) {
                const Eight values = *(const Eight*)(row + part * kEight);
                highest[part] = larger(highest[part], values);
                lowest[part] = larger(lowest[part], -values);
            }
        }
        for (int t = 0; t < padded; ++t) {
            largest[t] = highest[t / kEight][t % kEight];
            magnitude = std::max({magnitude, largest[t], (float)lowest[t / kEight][t % kEight]});
        }
        slack = 2e-6f * (float)(1.0 + (double)positions * magnitude);
        rest.assign(1 << positions, 0);
        for (int mask = (1 << positions) - 2; mask >= 0; --mask) {
            const int lowest = __builtin_ctz(~mask);
            rest[mask] = rest[mask | 1 << lowest] + largest[lowest];
        }
    }

    float worst() const { return (int64_t)best.size() == ask.results ? best.front().gain : -kInfinity; }

    void run() {
        const Levels levels(positions, ask.in_order);
        for (int64_t part = 0; part < num_parts; ++part) kept.push_back({(int32_t)part, 0});
        table.assign(num_parts, 0);
        for (int level = 0; level < positions && !kept.empty(); ++level) {
            meet_children(levels, level);
            choose();
            grow(levels, level);
        }
    }

    void meet_children(const Levels& levels, int level) {
        candidates.clear();
        met = 0;
        enough = left_out = -kInfinity;
        part_begin = 0;
        const std::vector<int32_t>& masks = levels.masks[level];
        for (size_t parent = 0; parent < kept.size(); ++parent) {
            if (parent && kept[parent].part != kept[parent - 1].part) next_part();
            float reach[kMostPadded], gain[kMostPadded];
            std::fill(reach, reach + kMostPadded, -kInfinity);
            std::fill(gain, gain + kMostPadded, -kInfinity);
            const float* sets = table.data() + parent * masks.size();
            for (size_t number = 0; number < masks.size(); ++number) {
                const float value = sets[number], with_rest = value + rest[masks[number]];
                for (int t = ask.in_order ? level : 0; t < (ask.in_order ? level + 1 : positions); ++t) {
                    if (masks[number] >> t & 1) continue;
                    reach[t] = std::max(reach[t], with_rest);
                    gain[t] = std::max(gain[t], value);
                }
            }
            for (int t = 0; t < positions; ++t) reach[t] -= largest[t];
            const FreshetTrie& trie = parts[kept[parent].part];
            const int32_t begin = trie.children[kept[parent].node], end = trie.children[kept[parent].node + 1];
            const auto meet = [&](int32_t node, int32_t place) {
                const float* ours = gains.data() + (int64_t)place * padded;
                answer_with(trie, node, largest_sum(gain, ours, padded));
                const float reached = largest_sum(reach, ours, padded);
                // Reading the trie is what a child costs, so whatever cannot change anything goes first.
                if (reached < worst() - slack || (reached < enough && reached <= left_out)) return;
                if (trie.children[node] == trie.children[node + 1]) return;
                consider({reached, kept[parent].part, node, (int32_t)parent, place, met++});
            };
            if (kept[parent].node == 0) {
                at_root(trie, meet);
            } else if (end - begin <= 2 * ask.num_tokens) {
                for (int32_t node = begin; node < end; ++node) {
                    const int32_t place = places.of(trie.tokens[node]);
                    if (place >= 0) meet(node, place);
                }
            } else {
                look_up(trie, begin, end, meet);
            }
        }
    }

    // Every scored token among the root's children.
    template <typename Meet>
    void at_root(const FreshetTrie& trie, const Meet& meet) {
        for (int64_t u = 0; u < ask.num_tokens; ++u) {
            const int64_t word = ask.tokens[u] >> 6;
            if (word >= trie.num_root_words) return;
            const uint64_t bit = 1ull << (ask.tokens[u] & 63), bits = trie.root_bits[word];
            if (bits & bit) {
                meet(1 + trie.root_ranks[word] + __builtin_popcountll(bits & (bit - 1)), (int32_t)u);
            }
        }
    }

    // Every scored token among very many children: steps that double, then a binary search.
    template <typename Meet>
    void look_up(const FreshetTrie& trie, int32_t begin, int32_t end, const Meet& meet) {
        int64_t at = begin;
        for (int64_t u = 0; u < ask.num_tokens && at < end; ++u) {
            const int32_t token = ask.tokens[u];
            int64_t step = 1, low = at;
            while (at < end && trie.tokens[at] < token) {
                low = at + 1;
                at += step;
                step *= 2;
            }
            const int32_t* found =
                std::lower_bound(trie.tokens + low, trie.tokens + std::min<int64_t>(at, end), token);
            at = found - trie.tokens;
            if (at < end && *found == token) meet((int32_t)at++, (int32_t)u);
        }
    }

    void answer_with(const FreshetTrie& trie, int32_t node, float value) {
        if (value < worst()) return;
        for (int32_t at = trie.ends[node]; at < trie.ends[node + 1]; ++at) {
            const Answer answer{value, trie.identifiers[at]};
            const bool full = (int64_t)best.size() == ask.results;
            // Identifiers of a node rise, so the next ones are no better.
            if (full && !better(answer, best.front())) return;
            if (ask.deleted[answer.identifier] || !allowed(answer.identifier)) continue;
            if (full) {
                std::pop_heap(best.begin(), best.end(), better);
                best.pop_back();
            }
            best.push_back(answer);
            std::push_heap(best.begin(), best.end(), better);
        }
    }

    bool allowed(int32_t identifier) const {
        if (!ask.allowed) return true;
        const bool added = identifier >= ask.first_added;
        const int64_t number = added ? identifier - ask.first_added : identifier;
        if (added && number >= ask.num_added) return false;
        const int64_t* offsets = added ? ask.added_offsets : ask.offsets;
        const int32_t* rows = added ? ask.added_rows : ask.rows;
        for (int64_t at = offsets[number]; at < offsets[number + 1]; ++at) {
            if (rows[at] < ask.num_items && ask.allowed[rows[at]]) return true;
        }
        return false;
    }

    // A level may have tens of thousands of children and keeps hundreds: it is cut down on the way.
    void consider(const Candidate& candidate) {
        if (candidate.bound < enough) {
            left_out = std::max(left_out, candidate.bound);
            return;
        }
        candidates.push_back(candidate);
        if ((int64_t)candidates.size() - part_begin >= 2 * ask.beams + 512) cut();
    }

    // Every part keeps `beams` of its own: what was inserted a moment ago is not crowded out by the big trie.
    void next_part() {
        cut();
        part_begin = (int64_t)candidates.size();
        enough = -kInfinity;
    }

    void cut() {
        if ((int64_t)candidates.size() - part_begin <= ask.beams) return;
        const auto begin = candidates.begin() + part_begin;
        const auto first = [](const Candidate& a, const Candidate& b) {
            return a.bound > b.bound || (a.bound == b.bound && a.order < b.order);
        };
        std::nth_element(begin, begin + ask.beams, candidates.end(), first);
        left_out = std::max(left_out, begin[ask.beams].bound);  // the best of those cut off
        candidates.resize(part_begin + ask.beams);
        enough = std::min_element(candidates.begin() + part_begin, candidates.end(),
                                  [](const Candidate& a, const Candidate& b) { return a.bound < b.bound; })
                     ->bound;
    }

    void choose() {
        cut();
        const float least = worst() - slack;
        if (left_out >= least) bound = std::max(bound, left_out);
        std::erase_if(candidates, [&](const Candidate& candidate) { return !(candidate.bound >= least); });
        std::sort(candidates.begin(), candidates.end(),
                  [](const Candidate& a, const Candidate& b) { return a.order < b.order; });
    }

    void grow(const Levels& levels, int level) {
        const size_t sets = levels.masks[level].size(), grown_sets = levels.masks[level + 1].size();
        grown.resize(candidates.size() * grown_sets);
        kept.clear();
        for (size_t number = 0; number < candidates.size(); ++number) {
            const Candidate& candidate = candidates[number];
            const float* from = table.data() + candidate.parent * sets;
            const float* ours = gains.data() + (int64_t)candidate.place * padded;
            float* to = grown.data() + number * grown_sets;
            for (size_t set = 0; set < grown_sets; ++set) {
                float value = -kInfinity;
                for (const auto& step : levels.steps[level + 1][set]) {
                    value = std::max(value, from[step.source] + ours[step.position]);
                }
                to[set] = value;
            }
            kept.push_back({candidate.part, candidate.node});
        }
        std::swap(table, grown);
    }
};

}  // namespace

extern "C" int64_t freshet_search_trie(const FreshetTrie* parts, int64_t num_parts, const FreshetTrieQuestion* ask) {
    thread_local Places places;
    thread_local std::vector<float> room;  // megabytes: fresh pages for every query would cost more than the search
    places.set(ask->tokens, ask->num_tokens);
    Search search(parts, num_parts, *ask, places, room);
    search.run();
    places.clear(ask->tokens, ask->num_tokens);
    std::sort(search.best.begin(), search.best.end(), better);
    for (size_t number = 0; number < search.best.size(); ++number) {
        ask->out_identifiers[number] = search.best[number].identifier;
        ask->out_gains[number] = search.best[number].gain;
    }
    *ask->out_bound = search.bound;
    return (int64_t)search.best.size();
}
