#include "page_pool.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace harli {

namespace {

// Range of one column in the KV view: its rows, and a guard block that is never mapped.
size_t column_bytes(const Grid& grid) { return (static_cast<size_t>(grid.rows) + 1) * grid.block_bytes; }

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

}  // namespace

PagePool::PagePool(std::shared_ptr<Driver> driver, Grid grid, Lending lending)
    : driver_(std::move(driver)), grid_(grid), lending_(lending) {
    if (grid_.rows == 0 || grid_.columns == 0 || grid_.block_bytes == 0) {
        throw ConfigError("page pool: a grid needs at least one row, one column and one byte a block");
    }
    const size_t granularity = driver_->granularity();
    if (grid_.block_bytes % granularity != 0) {
        throw ConfigError("page pool: blocks of " + std::to_string(grid_.block_bytes) +
                          " bytes are no multiple of the granularity of driver " + driver_->name() + ", " +
                          std::to_string(granularity) + " bytes");
    }
    blocks_.resize(grid_.blocks());
    states_.assign(grid_.rows, State::uncommitted);
    clean_.assign(grid_.rows, false);
    kv_base_ = driver_->reserve(grid_.columns * column_bytes(grid_), granularity);
    kv_reserved_ = true;
    try {
        general_base_ = driver_->reserve(grid_.rows * grid_.row_bytes(), granularity);
        general_reserved_ = true;
    } catch (...) {
        drop_ranges();
        throw;
    }
}

PagePool::~PagePool() { release(); }

Address PagePool::address(View view, uint32_t row, uint32_t column) const {
    if (view == kv_view) return kv_base_ + column * column_bytes(grid_) + row * grid_.block_bytes;
    return general_base_ + (static_cast<size_t>(row) * grid_.columns + column) * grid_.block_bytes;
}

Address PagePool::kv_address(uint32_t column, uint32_t row) const {
    if (column >= grid_.columns || row >= grid_.rows) {
        throw StateError("no KV block at column " + std::to_string(column) + ", row " + std::to_string(row));
    }
    return address(kv_view, row, column);
}

Address PagePool::general_address(uint32_t row, uint32_t column) const {
    if (column >= grid_.columns || row >= grid_.rows) {
        throw StateError("no general-purpose block at row " + std::to_string(row) + ", column " + std::to_string(column));
    }
    return address(general_view, row, column);
}

PagePool::State& PagePool::checked_state(const char* verb, uint32_t row, State wanted) {
    static constexpr const char* names[] = {"not committed", "with KV", "lent", "stranded by a driver error"};
    if (row >= grid_.rows || !kv_reserved_) {
        throw StateError(std::string("cannot ") + verb + " row " + std::to_string(row) + ": outside the grid, or it is released");
    }
    State& state = states_[row];
    if (state != wanted) {
        throw StateError(std::string("cannot ") + verb + " row " + std::to_string(row) + ": it is " +
                         names[static_cast<size_t>(state)] + ", not " + names[static_cast<size_t>(wanted)]);
    }
    return state;
}

void PagePool::map_row(View view, uint32_t row) {
    bool all_accessible = true;
    for (uint32_t column = 0; column < grid_.columns; ++column) {
        Block& it = block(row, column);
        if (!it.mapped[view]) {
            driver_->map(address(view, row, column), grid_.block_bytes, it.handle);
            it.mapped[view] = true;
        }
        all_accessible = all_accessible && it.accessible[view];
    }
    if (all_accessible) return;
    if (view == general_view) driver_->set_access(address(view, row, 0), grid_.row_bytes());  // one range
    for (uint32_t column = 0; column < grid_.columns; ++column) {
        Block& it = block(row, column);
        if (view == kv_view && !it.accessible[view]) {
            driver_->set_access(address(view, row, column), grid_.block_bytes);
        }
        it.accessible[view] = true;
    }
}

void PagePool::unmap_row(View view, uint32_t row) {
    for (uint32_t column = 0; column < grid_.columns; ++column) {
        Block& it = block(row, column);
        if (!it.mapped[view]) continue;
        driver_->unmap(address(view, row, column), grid_.block_bytes);
        it.mapped[view] = it.accessible[view] = false;
    }
}

// The new view is mapped before the old one goes, so that a failing map (the likely failure) leaves the old untouched.
void PagePool::move_row(uint32_t row, View from, View to) {
    bool was_there = false;  // after a fill that failed, see return_row: then it may be in use, and stays
    for (uint32_t column = 0; column < grid_.columns; ++column) was_there = was_there || block(row, column).mapped[to];
    try {
        map_row(to, row);
        unmap_row(from, row);
    } catch (...) {
        bool lost = refused([&] { map_row(from, row); });
        if (!was_there) lost = refused([&] { unmap_row(to, row); }) || lost;
        if (lost) {
            states_[row] = State::stranded;
            throw DriverError("row " + std::to_string(row) + " is stranded: a driver call failed, and so did undoing it");
        }
        throw;
    }
}

void PagePool::commit_row(uint32_t row, std::optional<uint16_t> pattern, Stream stream) {
    std::lock_guard lock(mutex_);
    State& state = checked_state("commit", row, State::uncommitted);
    try {
        for (uint32_t column = 0; column < grid_.columns; ++column) {
            Block& it = block(row, column);
            it.handle = driver_->create(grid_.block_bytes);
            it.created = true;
        }
        map_row(kv_view, row);
        if (lending_ == Lending::alias) map_row(general_view, row);
        if (pattern) fill_row(row, *pattern, stream);
    } catch (...) {
        drop_row(row);
        const auto first = blocks_.begin() + static_cast<ptrdiff_t>(row) * grid_.columns;
        const bool lost = std::any_of(first, first + grid_.columns, [](const Block& it) { return it.created; });
        if (lost) state = State::stranded;
        throw;
    }
    state = State::kv;
}

// Through the general-purpose view where it is mapped, since the row is one range there.
void PagePool::fill_row(uint32_t row, uint16_t pattern, Stream stream) {
    if (block(row, 0).mapped[general_view]) {
        driver_->fill(address(general_view, row, 0), pattern, grid_.row_bytes(), stream);
        return;
    }
    for (uint32_t column = 0; column < grid_.columns; ++column) {
        driver_->fill(address(kv_view, row, column), pattern, grid_.block_bytes, stream);
    }
}

void PagePool::lend_row(uint32_t row) {
    std::lock_guard lock(mutex_);
    const Stopwatch watch(stats_.lend);
    State& state = checked_state("lend", row, State::kv);
    if (lending_ == Lending::remap) move_row(row, kv_view, general_view);
    state = State::lent;
    clean_[row] = false;
    watch.done();
}

void PagePool::scrub_row(uint32_t row, uint16_t pattern, Stream stream) {
    std::lock_guard lock(mutex_);
    checked_state("scrub", row, State::lent);
    fill_row(row, pattern, stream);
    clean_[row] = true;
}

void PagePool::mark_used(uint32_t row) {
    std::lock_guard lock(mutex_);
    clean_[row] = false;
}

void PagePool::return_row(uint32_t row, std::optional<uint16_t> pattern, Stream stream) {
    std::lock_guard lock(mutex_);
    const Stopwatch watch(stats_.give_back);
    State& state = checked_state("return", row, State::lent);
    const bool fill = pattern.has_value() && !clean_[row];
    if (lending_ == Lending::alias) {
        if (fill) fill_row(row, *pattern, stream);
    } else {
        move_row(row, general_view, kv_view);
        try {
            if (fill) fill_row(row, *pattern, stream);
        } catch (...) {
            // Fills may be under way through the KV view, so it stays mapped: the row is lent again with both views,
            // and the next attempt goes on from there.
            if (refused([&] { map_row(general_view, row); })) state = State::stranded;
            throw;
        }
    }
    state = State::kv;
    clean_[row] = false;
    watch.done();
}

void PagePool::drop_row(uint32_t row) noexcept {
    for (uint32_t column = 0; column < grid_.columns; ++column) {
        Block& it = block(row, column);
        for (const View view : {kv_view, general_view}) {
            if (!it.mapped[view]) continue;
            it.mapped[view] = refused([&] { driver_->unmap(address(view, row, column), grid_.block_bytes); });
            it.accessible[view] = it.accessible[view] && it.mapped[view];
        }
        if (!it.created || it.mapped[kv_view] || it.mapped[general_view]) continue;
        it.created = refused([&] { driver_->release(it.handle); });
    }
}

size_t PagePool::drop_ranges() noexcept {
    const auto mapped = [this](View view) {
        return std::any_of(blocks_.begin(), blocks_.end(), [view](const Block& it) { return it.mapped[view]; });
    };
    if (kv_reserved_ && !mapped(kv_view)) {
        kv_reserved_ = refused([&] { driver_->free(kv_base_, grid_.columns * column_bytes(grid_)); });
    }
    if (general_reserved_ && !mapped(general_view)) {
        general_reserved_ = refused([&] { driver_->free(general_base_, grid_.rows * grid_.row_bytes()); });
    }
    return static_cast<size_t>(kv_reserved_) + static_cast<size_t>(general_reserved_);
}

size_t PagePool::release() noexcept {
    std::lock_guard lock(mutex_);
    size_t kept = 0;
    for (uint32_t row = 0; row < grid_.rows; ++row) {
        drop_row(row);
        bool whole = true;
        for (uint32_t column = 0; column < grid_.columns; ++column) {
            kept += block(row, column).created;
            whole = whole && !block(row, column).created;
        }
        states_[row] = whole ? State::uncommitted : State::stranded;
    }
    return kept + drop_ranges();
}

bool PagePool::is_lent(uint32_t row) const {
    std::lock_guard lock(mutex_);
    return row < grid_.rows && states_[row] == State::lent;
}

PoolStats PagePool::stats() const {
    std::lock_guard lock(mutex_);
    PoolStats now = stats_;
    for (const State state : states_) {
        now.rows_committed += state == State::kv || state == State::lent;
        now.rows_lent += state == State::lent;
        now.rows_stranded += state == State::stranded;
    }
    for (const Block& it : blocks_) now.physical_bytes += it.created ? grid_.block_bytes : 0;
    return now;
}

void PagePool::check_integrity() const {
    std::lock_guard lock(mutex_);
    for (size_t at = 0; at < blocks_.size(); ++at) {
        const Block& it = blocks_[at];
        const State state = states_[at / grid_.columns];
        if (state == State::stranded) continue;
        const bool committed = state != State::uncommitted;
        const bool in_kv = committed && (lending_ == Lending::alias || state == State::kv);
        const bool in_general = committed && (lending_ == Lending::alias || state == State::lent);
        // A lent row may still be in the KV view after a fill that failed; see return_row.
        const bool kv_right = it.mapped[kv_view] == in_kv || (state == State::lent && it.mapped[kv_view]);
        const bool reachable = it.mapped[kv_view] == it.accessible[kv_view] &&
                               it.mapped[general_view] == it.accessible[general_view];
        if (it.created != committed || !kv_right || it.mapped[general_view] != in_general || !reachable) {
            throw StateError("page pool: block " + std::to_string(at) + " is not created or mapped as its row's state says");
        }
    }
}

}  // namespace harli
