// Streams and events without a device: queues of work that run when they are told to.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <unordered_map>

#include "driver.hpp"

namespace harli {

// A stream that is not held runs its work at once. A held one keeps it until complete(), so that a test can hold a
// fence open for as long as it likes and see what is done meanwhile. Thread-safe.
class SoftwareStreams {
public:
    void submit(Stream stream, std::function<void()> work);
    void hold(Stream stream);
    void complete(Stream stream, uint64_t pieces);  // run the oldest pieces; more than there are is no error
    void let_go(Stream stream);                     // run everything, and from now on at once
    uint64_t outstanding(Stream stream) const;

    Event create_event();
    void record(Event event, Stream stream);
    bool query(Event event) const;  // an event never recorded has passed
    void destroy(Event event);
    uint64_t events() const;

private:
    struct Queue {
        uint64_t submitted = 0;
        uint64_t completed = 0;
        bool held = false;
        std::deque<std::function<void()>> waiting;
    };
    struct Mark {
        Stream stream = 0;
        uint64_t position = 0;
    };

    void run(Queue& queue, uint64_t pieces);

    mutable std::mutex mutex_;
    std::unordered_map<Stream, Queue> queues_;
    std::unordered_map<Event, Mark> marks_;
    Event next_event_ = 1;
};

}  // namespace harli
