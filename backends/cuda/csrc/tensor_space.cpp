#include "tensor_space.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <string>

namespace harli {

namespace {

uint32_t granules_a_block(const Grid& grid, size_t granule_bytes) {
    if (granule_bytes == 0 || grid.block_bytes % granule_bytes != 0) {
        throw ConfigError("tensor space: granules of " + std::to_string(granule_bytes) + " bytes do not divide a block of " +
                          std::to_string(grid.block_bytes) + " bytes");
    }
    return static_cast<uint32_t>(grid.block_bytes / granule_bytes);
}

// Without a string stream: those of a process that has loaded torch may not be this library's, and crash.
std::string hex(Address address) {
    std::array<char, 16> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), address, 16).ptr;
    return "0x" + std::string(digits.data(), end);
}

}  // namespace

TensorSpace::TensorSpace(std::shared_ptr<PagePool> pool, size_t granule_bytes)
    : pool_(std::move(pool)), granule_bytes_(granule_bytes), block_bytes_(pool_->grid().block_bytes),
      columns_(pool_->grid().columns), base_(pool_->general_address(0, 0)),
      view_bytes_(pool_->grid().blocks() * block_bytes_),
      fences_(std::shared_ptr<Driver>(pool_, &pool_->driver())), blocks_(pool_->grid()),
      granules_(granules_a_block(pool_->grid(), granule_bytes),
                [this](uint32_t block, Fence fence) {
                    slab_of_[block] = no_slab;
                    blocks_.give(block, 1, fences_.passed(fence) ? Fence{} : fence);
                }),
      slab_of_(pool_->grid().blocks(), no_slab), large_(pool_->grid().blocks()), live_in_row_(pool_->grid().rows) {}

Address TensorSpace::allocate(size_t bytes, Stream stream) {
    std::lock_guard lock(mutex_);
    const Stopwatch watch(counts_.allocate);
    if (bytes == 0) throw StateError("cannot allocate 0 bytes: at least 1 is needed");
    Address address = 0;
    if (bytes <= view_bytes_) {
        const auto granules = static_cast<uint32_t>((bytes + granule_bytes_ - 1) / granule_bytes_);
        const Tag tag = fences_.tag_of(stream);
        address = try_allocate(bytes, granules, tag);
        if (address == 0) {
            poll_locked();
            address = try_allocate(bytes, granules, tag);
        }
    }
    if (address == 0) {
        ++counts_.refused;
        throw OutOfMemory("no room for " + std::to_string(bytes) + " bytes in the lent rows: " +
                          std::to_string(blocks_.ready_blocks()) + " blocks of " + std::to_string(block_bytes_) +
                          " bytes are free, at most " + std::to_string(largest_allocatable()) + " bytes at adjacent addresses");
    }
    watch.done();
    return address;
}

Address TensorSpace::try_allocate(size_t bytes, uint32_t granules, Tag tag) {
    const uint32_t block_granules = granules_.granules();
    Address address = 0;
    if (granules < block_granules) {
        auto node = granules_.take(granules, tag);
        if (!node) {
            const auto block = blocks_.find(1, tag);
            if (!block) return 0;
            granules_.prepare_slab();
            const Fence fence = blocks_.fence_of(*block);
            blocks_.take(*block, 1);
            slab_of_[*block] = granules_.add_slab(*block, fence, 0, true);
            node = granules_.take(granules, tag);
        }
        granules_.live(*node) = {granules, static_cast<uint32_t>(bytes), tag};
        const uint32_t block = granules_.slab(*node / block_granules).block;
        count_in_rows({block, 0, *node, granules}, 1);
        address = address_of(block) + *node % block_granules * granule_bytes_;
    } else {
        const uint32_t whole = granules / block_granules;
        const uint32_t tail = granules % block_granules;
        const auto first = blocks_.find(whole + (tail > 0 ? 1 : 0), tag);
        if (!first) return 0;
        if (tail > 0) {
            granules_.prepare_slab();
            const uint32_t last = *first + whole;
            const Fence fence = blocks_.fence_of(last);
            blocks_.take(last, 1);
            slab_of_[last] = granules_.add_slab(last, fence, tail, true);
        }
        blocks_.take(*first, whole);
        large_[*first] = {whole, tail, bytes, tag};
        count_in_rows({*first, whole, 0, tail}, 1);
        address = address_of(*first);
    }
    ++counts_.live;
    counts_.requested_bytes += bytes;
    used_granules_ += granules;
    return address;
}

TensorSpace::Found TensorSpace::find(Address address, const char* verb) const {
    if (address >= base_ && address < base_ + view_bytes_ && (address - base_) % granule_bytes_ == 0) {
        const auto block = static_cast<uint32_t>((address - base_) / block_bytes_);
        const size_t offset = (address - base_) % block_bytes_;
        const uint32_t slab = slab_of_[block];
        if (slab != no_slab) {
            const auto node = static_cast<uint32_t>(slab * granules_.granules() + offset / granule_bytes_);
            const GranulePool::Live& live = granules_.live(node);
            if (live.granules > 0) return {Range{block, 0, node, live.granules}, live.tag, live.requested_bytes};
        } else if (offset == 0 && large_[block].blocks > 0) {
            const Large& it = large_[block];
            Range range{block, it.blocks, 0, it.tail_granules};
            if (it.tail_granules > 0) range.node = slab_of_[block + it.blocks] * granules_.granules();
            return {range, it.tag, it.requested_bytes};
        }
    }
    throw StateError(std::string("cannot ") + verb + " address " + hex(address) + ": nothing is allocated there (freed twice?)");
}

void TensorSpace::record_use(Address address, Stream stream) {
    std::lock_guard lock(mutex_);
    find(address, "record a use of");
    const Tag tag = fences_.tag_of(stream);
    auto& tags = uses_[address];
    if (std::find(tags.begin(), tags.end(), tag) == tags.end()) tags.push_back(tag);
}

void TensorSpace::free(Address address, Stream stream) {
    std::lock_guard lock(mutex_);
    const Stopwatch watch(counts_.free);
    const Found found = find(address, "free");
    const Tag tag = fences_.tag_of(stream);
    Held freed{found.range, Fence{}, {}};
    if (!uses_.empty() || found.tag != tag) {
        if (held_.size() == held_.capacity()) held_.reserve(2 * held_.size() + 16);  // here, where nothing has changed yet
        if (found.tag != tag) freed.others.push_back(fences_.now(found.tag));
        if (const auto uses = uses_.find(address); uses != uses_.end()) {
            for (const Tag other : uses->second) {
                if (other != tag && other != found.tag) freed.others.push_back(fences_.now(other));
            }
            uses_.erase(uses);
        }
    }
    freed.fence = fences_.now(tag);
    const uint32_t granules = found.range.blocks * granules_.granules() + found.range.granules;
    if (found.range.blocks > 0) {
        large_[found.range.first_block] = Large{};
    } else {
        granules_.live(found.range.node) = {};
    }
    count_in_rows(found.range, -1);
    --counts_.live;
    counts_.requested_bytes -= found.requested_bytes;
    used_granules_ -= granules;
    if (freed.others.empty()) {
        give_back(freed.range, freed.fence);
    } else {
        held_granules_ += granules;
        held_.push_back(std::move(freed));
    }
    watch.done();
}

void TensorSpace::give_back(const Range& range, Fence fence) {
    if (fences_.passed(fence)) fence = Fence{};
    if (range.blocks > 0) blocks_.give(range.first_block, range.blocks, fence);
    if (range.granules > 0) granules_.give(range.node, range.granules, fence);
}

void TensorSpace::poll() {
    std::lock_guard lock(mutex_);
    poll_locked();
}

void TensorSpace::poll_locked() {
    for (Tag tag = 1; tag <= fences_.tags(); ++tag) {
        if (!fences_.poll(tag)) continue;
        granules_.promote(tag, fences_.passed_epoch(tag));
        blocks_.promote(tag, fences_.passed_epoch(tag));
    }
    std::erase_if(held_, [this](const Held& it) {
        const auto passed = [this](const Fence& fence) { return fences_.passed(fence); };
        if (!std::all_of(it.others.begin(), it.others.end(), passed)) return false;
        held_granules_ -= it.range.blocks * granules_.granules() + it.range.granules;
        give_back(it.range, it.fence);
        return true;
    });
}

void TensorSpace::check_row(uint32_t row, const char* verb) const {
    if (row >= pool_->grid().rows || !blocks_.holds(row)) {
        throw StateError(std::string("cannot ") + verb + " row " + std::to_string(row) + ": the tensor space does not hold it");
    }
}

void TensorSpace::add_row(uint32_t row) {
    std::lock_guard lock(mutex_);
    if (row >= pool_->grid().rows || blocks_.holds(row) || !pool_->is_lent(row)) {
        throw StateError("cannot add row " + std::to_string(row) + " to the tensor space: not lent, or held already");
    }
    blocks_.add_row(row);
    pool_->mark_used(row);
}

void TensorSpace::set_row_open(uint32_t row, bool open) {
    open ? blocks_.open_row(row) : blocks_.close_row(row);
    for (uint32_t block = row * columns_; block < (row + 1) * columns_; ++block) {
        if (slab_of_[block] != no_slab) granules_.set_open(slab_of_[block], open);
    }
}

void TensorSpace::close_row(uint32_t row) {
    std::lock_guard lock(mutex_);
    check_row(row, "close");
    set_row_open(row, false);
}

void TensorSpace::open_row(uint32_t row) {
    std::lock_guard lock(mutex_);
    check_row(row, "open");
    set_row_open(row, true);
    pool_->mark_used(row);
}

void TensorSpace::remove_row(uint32_t row) {
    std::lock_guard lock(mutex_);
    check_row(row, "remove");
    if (blocks_.ready_in(row) != columns_) {
        throw StateError("cannot remove row " + std::to_string(row) + " from the tensor space: " +
                         std::to_string(columns_ - blocks_.free_in(row)) + " of its blocks are in use, " +
                         std::to_string(blocks_.free_in(row) - blocks_.ready_in(row)) + " wait for a fence");
    }
    blocks_.remove_row(row);
}

bool TensorSpace::holds_row(uint32_t row) const {
    std::lock_guard lock(mutex_);
    return row < pool_->grid().rows && blocks_.holds(row);
}

template <typename Wanted>
std::vector<uint32_t> TensorSpace::rows_where(Wanted&& wanted) const {
    std::lock_guard lock(mutex_);
    std::vector<uint32_t> found;
    for (uint32_t row = 0; row < pool_->grid().rows; ++row) {
        if (blocks_.holds(row) && wanted(row)) found.push_back(row);
    }
    return found;
}

std::vector<uint32_t> TensorSpace::rows() const {
    return rows_where([](uint32_t) { return true; });
}

std::vector<uint32_t> TensorSpace::rows_open() const {
    return rows_where([this](uint32_t row) { return blocks_.is_open(row); });
}

std::vector<uint32_t> TensorSpace::rows_empty() const {
    return rows_where([this](uint32_t row) { return blocks_.ready_in(row) == columns_; });
}

std::vector<uint32_t> TensorSpace::rows_idle() const {
    return rows_where([this](uint32_t row) { return live_in_row_[row] == 0; });
}

std::vector<uint32_t> TensorSpace::lowest_idle_rows(uint32_t count) const {
    std::lock_guard lock(mutex_);
    std::vector<uint32_t> found;
    for (uint32_t row = 0; row < pool_->grid().rows && found.size() < count; ++row) {
        if (blocks_.is_open(row) && live_in_row_[row] == 0) found.push_back(row);
    }
    return found;
}

bool TensorSpace::row_empty(uint32_t row) const {
    std::lock_guard lock(mutex_);
    return row < pool_->grid().rows && blocks_.holds(row) && blocks_.ready_in(row) == columns_;
}

bool TensorSpace::row_open(uint32_t row) const {
    std::lock_guard lock(mutex_);
    return row < pool_->grid().rows && blocks_.is_open(row);
}

void TensorSpace::count_in_rows(const Range& range, int change) {
    const uint32_t blocks = range.blocks == 0 ? 1 : range.blocks + (range.granules > 0 ? 1 : 0);
    const uint32_t last = (range.first_block + blocks - 1) / columns_;
    for (uint32_t row = range.first_block / columns_; row <= last; ++row) {
        live_in_row_[row] = static_cast<uint32_t>(static_cast<int64_t>(live_in_row_[row]) + change);
    }
}

bool TensorSpace::owns(Address address) const { return address >= base_ && address < base_ + view_bytes_; }

uint64_t TensorSpace::live() const {
    std::lock_guard lock(mutex_);
    return counts_.live;
}

size_t TensorSpace::size_of(Address address) const {
    std::lock_guard lock(mutex_);
    return find(address, "size").requested_bytes;
}

size_t TensorSpace::largest_allocatable() const {
    const size_t run = blocks_.longest_ready_run();
    return run > 0 ? run * block_bytes_ : granules_.largest_ready() * granule_bytes_;
}

SpaceStats TensorSpace::stats() const {
    std::lock_guard lock(mutex_);
    SpaceStats now = counts_;
    const Grid& grid = pool_->grid();
    for (uint32_t row = 0; row < grid.rows; ++row) now.rows += blocks_.holds(row);
    now.used_bytes = used_granules_ * granule_bytes_;
    now.free_bytes = blocks_.ready_blocks() * block_bytes_;
    now.pending_bytes = blocks_.pending_blocks() * block_bytes_ + held_granules_ * granule_bytes_;
    for (uint32_t slab = 0; slab < granules_.slabs(); ++slab) {
        if (!granules_.slab(slab).in_use) continue;
        now.cut_up_free_bytes += granules_.slab(slab).free_granules * granule_bytes_;
        for (uint32_t node = slab * granules_.granules(); node < (slab + 1) * granules_.granules(); ++node) {
            const auto piece = granules_.free_piece(node);
            if (!piece) continue;
            (piece->fence.tag == ready_tag ? now.free_bytes : now.pending_bytes) += piece->granules * granule_bytes_;
        }
    }
    now.fragmentation_bytes = now.cut_up_free_bytes + now.used_bytes - now.requested_bytes;
    now.largest_allocatable_bytes = largest_allocatable();
    return now;
}

void TensorSpace::reset_latencies() {
    std::lock_guard lock(mutex_);
    counts_.allocate = Latency{};
    counts_.free = Latency{};
}

void TensorSpace::check_integrity() const {
    std::lock_guard lock(mutex_);
    blocks_.check_integrity();
    granules_.check_integrity();
    const auto require = [](bool right, const std::string& what) {
        if (!right) throw StateError("tensor space: " + what);
    };
    // Every granule of every row held has one owner: free block, free piece, live allocation, or one held by fences.
    const uint32_t block_granules = granules_.granules();
    std::vector<uint32_t> owned(slab_of_.size());  // granules of each block that have an owner
    std::vector<uint8_t> piece(granules_.slabs() * block_granules);
    const auto own_piece = [&](uint32_t node, uint32_t count) {
        for (uint32_t at = node; at < node + count; ++at) require(piece[at]++ == 0, "a granule has two owners");
        owned[granules_.slab(node / block_granules).block] += count;
    };
    std::vector<uint32_t> live_in_row(live_in_row_.size());
    size_t live = 0;
    size_t requested = 0;
    size_t used = 0;
    const auto own_range = [&](const Range& range) {
        for (uint32_t block = range.first_block; block < range.first_block + range.blocks; ++block) {
            require(slab_of_[block] == no_slab && !blocks_.is_free(block), "a block of an allocation is free or cut up");
            owned[block] += block_granules;
        }
        if (range.granules > 0) own_piece(range.node, range.granules);
    };
    for (uint32_t block = 0; block < slab_of_.size(); ++block) {
        if (blocks_.is_free(block)) owned[block] += block_granules;
        if (slab_of_[block] != no_slab) {
            const GranulePool::Slab& slab = granules_.slab(slab_of_[block]);
            const bool right = slab.in_use && slab.block == block && !blocks_.is_free(block) &&
                               slab.open == blocks_.is_open(block / columns_);
            require(right, "slab and block do not agree");
        }
        const Large& it = large_[block];
        if (it.blocks == 0) continue;
        const uint32_t node = it.tail_granules > 0 ? slab_of_[block + it.blocks] * block_granules : 0;
        own_range({block, it.blocks, node, it.tail_granules});
        const uint32_t last = block + it.blocks - (it.tail_granules > 0 ? 0 : 1);
        for (uint32_t row = block / columns_; row <= last / columns_; ++row) ++live_in_row[row];
        ++live;
        requested += it.requested_bytes;
        used += static_cast<size_t>(it.blocks) * block_granules + it.tail_granules;
    }
    for (uint32_t node = 0; node < piece.size(); ++node) {
        if (const auto it = granules_.free_piece(node)) own_piece(node, it->granules);
        const GranulePool::Live& it = granules_.live(node);
        if (it.granules == 0) continue;
        own_piece(node, it.granules);
        ++live_in_row[granules_.slab(node / block_granules).block / columns_];
        ++live;
        requested += it.requested_bytes;
        used += it.granules;
    }
    size_t held = 0;
    for (const Held& it : held_) {
        own_range(it.range);
        held += static_cast<size_t>(it.range.blocks) * block_granules + it.range.granules;
    }
    for (uint32_t block = 0; block < owned.size(); ++block) {
        const bool in_row = blocks_.holds(block / columns_);
        require(owned[block] == (in_row ? block_granules : 0), "block " + std::to_string(block) + " is not wholly owned");
        require(!in_row || pool_->is_lent(block / columns_), "a row is held but not lent");
    }
    require(live_in_row == live_in_row_, "allocations of a row are miscounted");
    require(live == counts_.live && requested == counts_.requested_bytes && used == used_granules_ && held == held_granules_,
            "allocations are miscounted");
}

}  // namespace harli
