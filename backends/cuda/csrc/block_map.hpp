// Free blocks of the lent rows, as bitmaps: which are ready, and which wait for a stream.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "fences.hpp"
#include "page_pool.hpp"

namespace harli {

// Block id = row * columns + column, the order of the general-purpose view.
//
//     row 6   . . . . . . . .     empty: kept so where possible, low rows longest, since KV grows upwards
//     row 7   # # # . . s . .     partly used: filled first;  s: freed on stream s, whose fence has not passed
//     row 8   x x x x x x x x     closed: nothing is allocated here any more, it is on its way back
//
// A block that is not free belongs to the tensor space: an allocation, a slab of granules, or one held by fences.
class BlockMap {
public:
    explicit BlockMap(Grid grid);

    void add_row(uint32_t row, Fence fence);     // all its blocks free behind the fence
    void refence_row(uint32_t row, Fence fence);  // the same for a row whose blocks are all ready
    void remove_row(uint32_t row);  // all its blocks must be ready
    void close_row(uint32_t row) { set_open(row, false); }
    void open_row(uint32_t row) { set_open(row, true); }

    bool holds(uint32_t row) const { return held_[row]; }
    bool is_open(uint32_t row) const { return open_row_[row]; }
    uint32_t free_in(uint32_t row) const { return row_free_[row]; }
    uint32_t ready_in(uint32_t row) const { return row_ready_[row]; }

    // First of `count` adjacent blocks that a stream may use now: where they touch the fewest empty rows, of equals the
    // highest. Looks at both ends of every free run.
    std::optional<uint32_t> find(uint32_t count, Tag tag) const;
    Fence fence_of(uint32_t block) const;  // of a free block
    void take(uint32_t first, uint32_t count);
    void give(uint32_t first, uint32_t count, Fence fence);
    void promote(Tag tag, uint64_t passed_epoch);  // blocks whose fence has passed become ready

    bool is_free(uint32_t block) const { return tag_[block] != not_free; }
    size_t ready_blocks() const { return ready_blocks_; }
    size_t pending_blocks() const { return free_blocks_ - ready_blocks_; }
    uint32_t longest_ready_run() const;  // in open rows
    void check_integrity() const;        // throws StateError

private:
    static constexpr Tag not_free = ~Tag{0};
    using Bits = std::vector<uint64_t>;

    template <typename Visit>
    void each_run_downwards(Tag tag, Visit&& visit) const;
    uint32_t empty_rows_touched(uint32_t first, uint32_t count) const;
    Bits& bits_of(Tag tag);
    void set_open(uint32_t row, bool open);

    Grid grid_;
    std::vector<bool> held_;
    std::vector<bool> open_row_;
    std::vector<uint32_t> row_free_;
    std::vector<uint32_t> row_ready_;
    std::vector<Tag> tag_;         // of each free block, else not_free
    std::vector<uint64_t> epoch_;  // of each free block
    std::vector<Bits> free_;       // by tag
    Bits open_;
    size_t free_blocks_ = 0;
    size_t ready_blocks_ = 0;
};

}  // namespace harli
