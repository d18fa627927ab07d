// The physical blocks of the grid, and the two virtual views through which they are seen.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "driver.hpp"
#include "fences.hpp"
#include "latency.hpp"

namespace harli {

struct Grid {
    uint32_t rows = 0;
    uint32_t columns = 0;
    size_t block_bytes = 0;

    size_t blocks() const { return static_cast<size_t>(rows) * columns; }
    size_t row_bytes() const { return columns * block_bytes; }

    // Throws ConfigError unless everything that is computed from a grid stays within its type, and the tables within
    // some hundred MiB: at least one row, one column and one byte a block, at most 2,097,152 blocks and 64 TiB of addresses.
    static Grid checked(uint64_t rows, uint64_t columns, uint64_t block_bytes);
};

// alias: both views are mapped when a row is committed, so that lending touches tables only.
// remap: a row is mapped in the view of its holder alone; a stray access through the other faults.
enum class Lending { alias, remap };

struct PoolStats {
    uint32_t rows_committed = 0;
    uint32_t rows_lent = 0;
    uint32_t rows_stranded = 0;
    size_t physical_bytes = 0;
    Latency lend;
    Latency give_back;
};

// Run a clean-up step; true if the driver refused it.
template <typename Step>
bool refused(Step&& step) noexcept {
    try {
        step();
        return false;
    } catch (const std::exception&) {
        return true;
    }
}

//   KV view, one range a column, each with a guard block after it     general-purpose view, row after row
//     column 0  [r0][r1][r2]...|guard|                                  [r0 c0][r0 c1]..[r0 cN][r1 c0][r1 c1]...
//     column 1  [r0][r1][r2]...|guard|                                  adjacent lent rows are contiguous
//
// Blocks are created by create_blocks, or by commit_row where they are not there yet, and stay until release(). A call
// that throws has changed nothing: what it had done is undone. Where the driver refuses even that, the row is stranded: nobody may use it, release() still frees it.
// The caller answers for the order of GPU work: a row is lent or given back once the work that used it has passed. For
// its own fills the pool answers: no row changes hands in a way that one still under way could show or harm.
// After release() everything but that is refused, and in a forked child, which shares the memory, everything. Thread-safe.
class PagePool {
public:
    PagePool(std::shared_ptr<Driver> driver, Grid grid, Lending lending);
    ~PagePool();
    PagePool(const PagePool&) = delete;
    PagePool& operator=(const PagePool&) = delete;

    // Create every block that is not there yet, all of one column before those of the next: a layer's K or V, which is
    // one range in the KV view, then lies in the order in which the driver hands physical memory out.
    void create_blocks();
    // Map the row's blocks, created here if they are not there yet, filled on `stream` unless `pattern` is absent.
    void commit_row(uint32_t row, std::optional<uint16_t> pattern, Stream stream);
    // Under remap, refused while a fill through the KV view, which is unmapped here, has not passed.
    void lend_row(uint32_t row);

    // For tensor spaces: a lent row has at most one holder, and is not given back while it has. Both say on which stream
    // a fill of the row may still be under way, for work on other streams to be kept behind it.
    std::optional<Stream> hold_row(uint32_t row);
    std::optional<Stream> reuse_row(uint32_t row);  // held memory will be written again: what scrub_row filled counts no more
    void let_row_go(uint32_t row);
    void take_events_of(Fences& fences);  // which the driver did not destroy: release() tries again

    // Fill a lent row through the general-purpose view, so that return_row finds it clean; `held` says whether a tensor
    // space holds it, and must be right. The row must not be written after that.
    void scrub_row(uint32_t row, uint16_t pattern, Stream stream, bool held = false);

    // Give a lent row back to KV. One that is not clean is filled on `stream`, unless `pattern` is absent. Refused while a
    // tensor space holds the row, and while a scrub of it has not passed (by alias, one on another stream).
    void return_row(uint32_t row, std::optional<uint16_t> pattern, Stream stream);

    // Unmap, release and free everything; any state, more than once. Driver errors do not stop it; returns how many
    // blocks, ranges and events the driver kept. Nothing in a forked child.
    size_t release() noexcept;
    bool released() const { return released_; }

    Address kv_address(uint32_t column, uint32_t row) const;
    Address general_address(uint32_t row, uint32_t column) const;
    bool is_lent(uint32_t row) const;
    PoolStats stats() const;
    void check_integrity() const;

    const Grid& grid() const { return grid_; }
    Lending lending() const { return lending_; }
    Driver& driver() const { return *driver_; }

private:
    enum class State : uint8_t { uncommitted, kv, lent, stranded };
    enum View : uint8_t { kv_view = 0, general_view = 1 };
    struct Fill {
        Fence fence;  // behind it; of ready_tag where there was none
        View view = kv_view;
    };
    struct Block {
        Handle handle = 0;
        bool created = false;
        bool mapped[2] = {false, false};
        bool accessible[2] = {false, false};
    };

    Block& block(uint32_t row, uint32_t column) { return blocks_[static_cast<size_t>(row) * grid_.columns + column]; }
    Address address(View view, uint32_t row, uint32_t column) const;
    std::unique_lock<std::mutex> lock(const char* verb) const;
    void require_unreleased(const char* verb) const;
    State& checked_state(const char* verb, uint32_t row, State wanted);
    void fill_row(uint32_t row, uint16_t pattern, Stream stream);
    bool fill_passed(uint32_t row);
    std::optional<Stream> fill_under_way(uint32_t row);
    void map_row(View view, uint32_t row);
    void unmap_row(View view, uint32_t row);
    void move_row(uint32_t row, View from, View to);
    std::vector<Block*> create_missing(uint32_t first_row, uint32_t end_row);
    void release_blocks(const std::vector<Block*>& blocks) noexcept;  // those that are not mapped
    void drop_mappings(uint32_t row) noexcept;
    size_t drop_ranges() noexcept;

    std::shared_ptr<Driver> driver_;
    Grid grid_;
    Lending lending_;
    mutable std::mutex mutex_;
    Address kv_base_ = 0;
    Address general_base_ = 0;
    bool kv_reserved_ = false;
    bool general_reserved_ = false;
    std::vector<Block> blocks_;
    std::vector<State> states_;
    std::vector<bool> clean_;
    std::vector<bool> held_;
    std::vector<Fill> fills_;  // the last one of each row
    Fences fences_;
    std::atomic<bool> released_{false};
    PoolStats stats_;
};

}  // namespace harli
