// Loops over tiles on a given number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace freshet {

// Calls body(tile, worker) for every tile in [0, tiles), worker in [0, threads): each worker takes the next tile when
// it is done with its last. The calling thread is worker 0; a thread costs about 20 us to start, so callers with
// little work ask for one.
template <typename Body>
void parallel_tiles(int64_t tiles, int threads, const Body& body) {
    threads = static_cast<int>(std::min<int64_t>(threads, tiles));
    std::atomic<int64_t> next{0};
    const auto work = [&](int worker) {
        for (int64_t tile = next++; tile < tiles; tile = next++) body(tile, worker);
    };
    std::vector<std::thread> others;
    for (int worker = 1; worker < threads; ++worker) others.emplace_back(work, worker);
    work(0);
    for (auto& other : others) other.join();
}

}  // namespace freshet
