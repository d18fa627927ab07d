// Which work of which stream has passed, found by polling events, never by waiting.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "driver.hpp"

namespace harli {

using Tag = uint32_t;  // a stream, numbered in the order of first use from 1
inline constexpr Tag ready_tag = 0;  // memory that any stream may use

// What memory waits for: everything that its stream was given before the event that closes the epoch.
struct Fence {
    Tag tag = ready_tag;
    uint64_t epoch = 0;
};

// A free costs no driver call: it is tagged with the epoch that its stream is in. poll() closes that epoch with one
// event for all frees in it. The event comes after the frees, so it is never too early.
//
//     stream S   kernel  free a  kernel  free b  |event| kernel  free c
//     epoch      ------------- 1 ----------------|------ 2 --------------
//
// A stream must outlive its frees. Not thread-safe: the tensor space locks.
class Fences {
public:
    explicit Fences(std::shared_ptr<Driver> driver) : driver_(std::move(driver)) {}
    ~Fences() { drop_events(); }
    Fences(const Fences&) = delete;
    Fences& operator=(const Fences&) = delete;

    Tag tag_of(Stream stream);
    Tag tags() const { return static_cast<Tag>(lines_.size()); }  // tags are 1 to tags()
    Fence now(Tag tag);                                           // a fence behind all that the stream was given so far
    bool passed(Fence fence) const { return fence.tag == ready_tag || fence.epoch <= lines_[fence.tag - 1].passed; }
    uint64_t passed_epoch(Tag tag) const { return lines_[tag - 1].passed; }
    Stream stream_of(Tag tag) const { return lines_[tag - 1].stream; }
    size_t drop_events() noexcept;     // fences are good for nothing after that; returns how many the driver kept
    void take_events_of(Fences& other);  // the ones that it kept, to try again
    // Close the epoch if fences need it, look at events; true if passed_epoch has advanced since this last said so.
    bool poll(Tag tag);

private:
    struct Closing {
        Event event = 0;
        uint64_t epoch = 0;
    };
    struct Line {
        Stream stream = 0;
        uint64_t open = 1;
        uint64_t passed = 0;
        uint64_t told = 0;  // what `passed` was when poll last returned: one that throws may have got on
        bool wanted = false;  // a fence of the open epoch was given out
        std::deque<Closing> closing;
    };

    std::shared_ptr<Driver> driver_;
    std::vector<Line> lines_;
    std::vector<Event> spare_;
    Tag last_ = 1;
};

}  // namespace harli
