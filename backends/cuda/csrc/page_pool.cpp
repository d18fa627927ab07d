#include "page_pool.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace harli {

namespace {

// Range of one column in the KV view: its rows, and a guard block that is never mapped.
size_t column_bytes(const Grid& grid) { return (static_cast<size_t>(grid.rows) + 1) * grid.block_bytes; }

}  // namespace

Grid Grid::checked(uint64_t rows, uint64_t columns, uint64_t block_bytes) {
    constexpr uint64_t most_blocks = uint64_t{1} << 21;
    constexpr uint64_t most_bytes = uint64_t{1} << 46;
    const std::string asked = "page pool: a grid of " + std::to_string(rows) + " rows, " + std::to_string(columns) +
                              " columns and " + std::to_string(block_bytes) + " bytes a block ";
    if (rows == 0 || columns == 0 || block_bytes == 0) {
        throw ConfigError(asked + "is empty: at least one row, one column and one byte a block are needed");
    }
    if (rows > most_blocks / columns) throw ConfigError(asked + "has too many blocks: at most " + std::to_string(most_blocks));
    if (block_bytes > most_bytes / (columns * (rows + 1))) {  // the KV view with its guard blocks is the larger view
        throw ConfigError(asked + "is too large: at most " + std::to_string(most_bytes) + " bytes of addresses a view");
    }
    return {static_cast<uint32_t>(rows), static_cast<uint32_t>(columns), block_bytes};
}

PagePool::PagePool(std::shared_ptr<Driver> driver, Grid grid, Lending lending)
    : driver_(std::move(driver)), grid_(Grid::checked(grid.rows, grid.columns, grid.block_bytes)), lending_(lending),
      fences_(driver_) {
    const size_t granularity = driver_->granularity();
    if (grid_.block_bytes % granularity != 0) {
        throw ConfigError("page pool: blocks of " + std::to_string(grid_.block_bytes) +
                          " bytes are no multiple of the granularity of driver " + driver_->name() + ", " +
                          std::to_string(granularity) + " bytes");
    }
    blocks_.resize(grid_.blocks());
    states_.assign(grid_.rows, State::uncommitted);
    clean_.assign(grid_.rows, false);
    held_.assign(grid_.rows, false);
    fills_.resize(grid_.rows);
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

std::unique_lock<std::mutex> PagePool::lock(const char* verb) const {
    driver_->require_home(verb);  // before locking: the thread that had the mutex may not be in a forked child
    return std::unique_lock(mutex_);
}

void PagePool::require_unreleased(const char* verb) const {
    if (released_) throw StateError(std::string("cannot ") + verb + ": the page pool is released");
}

Address PagePool::kv_address(uint32_t column, uint32_t row) const {
    require_unreleased("give an address");
    if (column >= grid_.columns || row >= grid_.rows) {
        throw StateError("there is no KV block at column " + std::to_string(column) + ", row " + std::to_string(row));
    }
    return address(kv_view, row, column);
}

Address PagePool::general_address(uint32_t row, uint32_t column) const {
    require_unreleased("give an address");
    if (column >= grid_.columns || row >= grid_.rows) {
        throw StateError("there is no general-purpose block at row " + std::to_string(row) + ", column " + std::to_string(column));
    }
    return address(general_view, row, column);
}

PagePool::State& PagePool::checked_state(const char* verb, uint32_t row, State wanted) {
    static constexpr const char* names[] = {"uncommitted", "with KV", "lent", "stranded by a driver error"};
    const std::string action = std::string(verb) + " row " + std::to_string(row);
    require_unreleased(action.c_str());
    if (row >= grid_.rows) throw StateError("cannot " + action + ": the grid has rows 0 to " + std::to_string(grid_.rows - 1));
    State& state = states_[row];
    if (state != wanted) {
        throw StateError("cannot " + action + ": it is " + names[static_cast<size_t>(state)] + " and must be " +
                         names[static_cast<size_t>(wanted)]);
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

void PagePool::create_blocks() {
    const auto locked = lock("create blocks");
    require_unreleased("create blocks");
    create_missing(0, grid_.rows);
}

// Column after column: a column is read and written as one range, and blocks that are created one after the other lie
// better for that.
std::vector<PagePool::Block*> PagePool::create_missing(uint32_t first_row, uint32_t end_row) {
    std::vector<Block*> made;
    made.reserve(static_cast<size_t>(end_row - first_row) * grid_.columns);
    try {
        for (uint32_t column = 0; column < grid_.columns; ++column) {
            for (uint32_t row = first_row; row < end_row; ++row) {
                Block& it = block(row, column);
                if (it.created) continue;
                it.handle = driver_->create(grid_.block_bytes);
                it.created = true;
                made.push_back(&it);
            }
        }
    } catch (...) {
        release_blocks(made);
        throw;
    }
    return made;
}

void PagePool::release_blocks(const std::vector<Block*>& blocks) noexcept {
    for (Block* const it : blocks) {
        if (it->mapped[kv_view] || it->mapped[general_view]) continue;
        it->created = refused([&] { driver_->release(it->handle); });
    }
}

void PagePool::commit_row(uint32_t row, std::optional<uint16_t> pattern, Stream stream) {
    const auto locked = lock("commit a row");
    State& state = checked_state("commit", row, State::uncommitted);
    std::vector<Block*> made;
    try {
        made = create_missing(row, row + 1);
        map_row(kv_view, row);
        if (lending_ == Lending::alias) map_row(general_view, row);
        if (pattern) fill_row(row, *pattern, stream);
    } catch (...) {
        if (fill_under_way(row)) {  // of some columns: they must not be unmapped under it
            state = State::stranded;
            throw DriverError("row " + std::to_string(row) + " is stranded: filling it failed midway, and it cannot be unmapped yet");
        }
        drop_mappings(row);
        release_blocks(made);
        const auto first = blocks_.begin() + static_cast<ptrdiff_t>(row) * grid_.columns;
        const bool lost = std::any_of(first, first + grid_.columns, [](const Block& it) {
            return it.mapped[kv_view] || it.mapped[general_view];
        });
        if (lost) state = State::stranded;
        throw;
    }
    state = State::kv;
}

void PagePool::drop_mappings(uint32_t row) noexcept {
    for (uint32_t column = 0; column < grid_.columns; ++column) {
        Block& it = block(row, column);
        for (const View view : {kv_view, general_view}) {
            if (!it.mapped[view]) continue;
            it.mapped[view] = refused([&] { driver_->unmap(address(view, row, column), grid_.block_bytes); });
            it.accessible[view] = it.accessible[view] && it.mapped[view];
        }
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
    if (!driver_->at_home()) return 0;
    const std::lock_guard locked(mutex_);
    released_ = true;
    size_t kept = 0;
    for (uint32_t row = 0; row < grid_.rows; ++row) {
        drop_mappings(row);
        bool whole = true;
        for (uint32_t column = 0; column < grid_.columns; ++column) {
            Block& it = block(row, column);
            if (it.created && !it.mapped[kv_view] && !it.mapped[general_view]) {
                it.created = refused([&] { driver_->release(it.handle); });
            }
            kept += it.created;
            whole = whole && !it.created;
        }
        states_[row] = whole ? State::uncommitted : State::stranded;
    }
    fills_.assign(fills_.size(), Fill{});
    return kept + drop_ranges() + fences_.drop_events();
}

bool PagePool::is_lent(uint32_t row) const {
    const auto locked = lock("look at a row");
    return row < grid_.rows && states_[row] == State::lent;
}

PoolStats PagePool::stats() const {
    const auto locked = lock("count rows");
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
    const auto locked = lock("check the pool");
    for (uint32_t row = 0; row < grid_.rows; ++row) {
        if (held_[row] && !released_ && states_[row] != State::lent) {
            throw StateError("page pool: row " + std::to_string(row) + " is held but not lent");
        }
    }
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
        if (it.created < committed || !kv_right || it.mapped[general_view] != in_general || !reachable) {
            throw StateError("page pool: block " + std::to_string(at) + " is not created or mapped as its row's state says");
        }
    }
}

}  // namespace harli
