// General-purpose memory for finetuning in the rows that it was lent.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "block_map.hpp"
#include "granule_pool.hpp"
#include "latency.hpp"
#include "page_pool.hpp"

namespace harli {

struct SpaceStats {
    uint32_t rows = 0;
    uint64_t live = 0;                 // allocations
    size_t requested_bytes = 0;        // asked for by live allocations
    size_t used_bytes = 0;             // the same in granules
    size_t free_bytes = 0;             // usable by any stream at once
    size_t pending_bytes = 0;          // freed, but a fence has not passed
    size_t cut_up_free_bytes = 0;      // free or pending in blocks that hold small tensors: of no use to large ones
    size_t fragmentation_bytes = 0;    // cut_up_free_bytes, and what rounding up to granules costs
    size_t largest_allocatable_bytes = 0;
    uint64_t refused = 0;              // allocations for which there was no room
    Latency allocate;
    Latency free;
};

// Requests of a block or more get whole blocks at adjacent addresses, across lent rows where needed; what is left of
// them, and every smaller request, comes from slabs of granules.
//
// Stream order: memory freed on stream S may be used again on S at once. On another stream it may be once everything
// that S was given before the free has passed, and the same holds for the stream that it was allocated on and for those
// named by record_use (for S too, then). poll() finds out; nothing waits.
//
// Once the pool is released nothing is allocated any more; what is live can be freed. In a forked child, which shares the
// memory, everything is refused but freeing, and that does nothing.
//
// A call that throws has changed nothing. Thread-safe: one lock, taken before the pool's and never by the pool.
class TensorSpace {
public:
    TensorSpace(std::shared_ptr<PagePool> pool, size_t granule_bytes);  // throws ConfigError before any table is built
    ~TensorSpace();
    TensorSpace(const TensorSpace&) = delete;
    TensorSpace& operator=(const TensorSpace&) = delete;

    Address allocate(size_t bytes, Stream stream);  // throws OutOfMemory
    void record_use(Address address, Stream stream);
    void free(Address address, Stream stream);
    void poll();

    void add_row(uint32_t row);     // lent by the pool, and held by no other space; the pool does not take it back before
    void close_row(uint32_t row);   // allocate nothing here any more
    void open_row(uint32_t row);
    void scrub_row(uint32_t row, uint16_t pattern, Stream stream);  // fill and close; throws unless it is empty
    void remove_row(uint32_t row);  // throws unless it is empty

    bool holds_row(uint32_t row) const;
    std::vector<uint32_t> rows() const;
    std::vector<uint32_t> rows_open() const;   // the ones not closed
    std::vector<uint32_t> rows_empty() const;  // nothing is allocated there and all fences have passed: can be removed
    std::vector<uint32_t> rows_idle() const;   // nothing is allocated there, but fences may not have passed
    std::vector<uint32_t> lowest_idle_rows(uint32_t count) const;  // the same, open rows only, at most `count`
    bool row_empty(uint32_t row) const;
    bool row_open(uint32_t row) const;
    bool owns(Address address) const;          // whether it lies in the general-purpose view
    uint64_t live() const;                     // allocations
    size_t size_of(Address address) const;     // bytes asked for; throws unless something is allocated there
    SpaceStats stats() const;
    void reset_latencies();
    void check_integrity() const;

    PagePool& pool() const { return *pool_; }
    // Whether another thread is in a call just now, which may be waiting for the driver or the pool.
    bool busy() const { return !std::unique_lock(mutex_, std::try_to_lock).owns_lock(); }

private:
    struct Large {  // an allocation that begins at this block; its tail is the head of the slab in the block after
        uint32_t blocks = 0;
        uint32_t tail_granules = 0;
        size_t requested_bytes = 0;
        Tag tag = ready_tag;
    };
    struct Range {  // what an allocation occupies
        uint32_t first_block = 0;
        uint32_t blocks = 0;
        uint32_t node = 0;  // of the slab piece, if granules > 0
        uint32_t granules = 0;
    };
    struct Held {  // freed, but for streams other than the one it was freed on
        Range range;
        Fence fence;
        std::vector<Fence> others;
    };
    struct Found {
        Range range;
        Tag tag = ready_tag;
        size_t requested_bytes = 0;
    };
    static constexpr uint32_t no_slab = ~uint32_t{0};

    Address try_allocate(size_t bytes, uint32_t granules, Tag tag);  // 0 if there is no room
    Found find(Address address, const char* verb) const;
    void give_back(const Range& range, Fence fence);
    void count_in_rows(const Range& range, int change);
    void poll_locked();
    template <typename Wanted>
    std::vector<uint32_t> rows_where(Wanted&& wanted) const;
    std::unique_lock<std::mutex> lock(const char* verb) const;
    Fence fence_behind(std::optional<Stream> stream);
    void check_row(uint32_t row, const char* verb) const;
    void check_empty(uint32_t row, const char* verb) const;
    void set_row_open(uint32_t row, bool open);
    size_t largest_allocatable() const;
    Address address_of(uint32_t block) const { return base_ + block * block_bytes_; }

    std::shared_ptr<PagePool> pool_;
    mutable std::mutex mutex_;
    size_t granule_bytes_;
    size_t block_bytes_;
    uint32_t columns_;
    Address base_;
    size_t view_bytes_;
    Fences fences_;
    BlockMap blocks_;
    GranulePool granules_;
    std::vector<uint32_t> slab_of_;  // by block
    std::vector<Large> large_;       // by first block
    std::vector<uint32_t> live_in_row_;  // allocations that touch it
    std::vector<Held> held_;
    bool fences_moved_ = false;  // since held_ was looked through
    std::unordered_map<Address, std::vector<Tag>> uses_;
    size_t held_granules_ = 0;
    size_t used_granules_ = 0;
    SpaceStats counts_;  // live, requested, refused and latencies; the rest is computed
};

}  // namespace harli
