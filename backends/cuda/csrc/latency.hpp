// Count, least, mean and greatest duration of an operation.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

namespace harli {

struct Latency {
    uint64_t count = 0;
    uint64_t total_ns = 0;
    uint64_t min_ns = std::numeric_limits<uint64_t>::max();
    uint64_t max_ns = 0;

    void add(uint64_t ns) {
        ++count;
        total_ns += ns;
        min_ns = std::min(min_ns, ns);
        max_ns = std::max(max_ns, ns);
    }
};

// Adds the time from construction to done(); an operation that throws is not counted.
class Stopwatch {
public:
    explicit Stopwatch(Latency& into) : into_(into), start_(std::chrono::steady_clock::now()) {}
    void done() const {
        const auto spent = std::chrono::steady_clock::now() - start_;
        into_.add(static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count()));
    }

private:
    Latency& into_;
    std::chrono::steady_clock::time_point start_;
};

}  // namespace harli
