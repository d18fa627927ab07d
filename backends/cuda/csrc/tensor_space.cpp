#include "tensor_space.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <string>

namespace harli {

namespace {

// Before any table is built from it: granules are counted in 32 bits, over all blocks.
size_t checked_granule_bytes(const Grid& grid, size_t granule_bytes) {
    const std::string asked = "tensor space: granules of " + std::to_string(granule_bytes) + " bytes ";
    if (granule_bytes == 0 || grid.block_bytes % granule_bytes != 0) {
        throw ConfigError(asked + "do not divide a block of " + std::to_string(grid.block_bytes) + " bytes");
    }
    const size_t granules = grid.block_bytes / granule_bytes;
    if (!std::has_single_bit(granules)) {
        throw ConfigError(asked + "make " + std::to_string(granules) + " of a block, which must be a power of two granules");
    }
    constexpr size_t most = (size_t{1} << 32) - 1;
    if (granules > most / grid.blocks()) {
        throw ConfigError(asked + "make " + std::to_string(granules) + " of each of " + std::to_string(grid.blocks()) +
                          " blocks: together at most " + std::to_string(most) + ", so take larger granules");
    }
    if (grid.block_bytes > most) throw ConfigError("tensor space: blocks of 4 GiB or more cannot be cut up");
    return granule_bytes;
}

// Without a string stream: those of a process that has loaded torch may not be this library's, and crash.
std::string hex(Address address) {
    std::array<char, 16> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), address, 16).ptr;
    return "0x" + std::string(digits.data(), end);
}

}  // namespace

TensorSpace::TensorSpace(std::shared_ptr<PagePool> pool, size_t granule_bytes)
    : pool_(std::move(pool)), granule_bytes_(checked_granule_bytes(pool_->grid(), granule_bytes)), block_bytes_(pool_->grid().block_bytes),
      columns_(pool_->grid().columns), base_(pool_->general_address(0, 0)),
      view_bytes_(pool_->grid().blocks() * block_bytes_),
      fences_(std::shared_ptr<Driver>(pool_, &pool_->driver())), blocks_(pool_->grid()),
      granules_(static_cast<uint32_t>(block_bytes_ / granule_bytes_),
                [this](uint32_t block, Fence fence) {
                    slab_of_[block] = no_slab;
                    blocks_.give(block, 1, fences_.passed(fence) ? Fence{} : fence);
                }),
      slab_of_(pool_->grid().blocks(), no_slab), large_(pool_->grid().blocks()), live_in_row_(pool_->grid().rows) {}

TensorSpace::~TensorSpace() {
    if (!pool_->driver().at_home()) return;
    for (const uint32_t row : rows()) pool_->let_row_go(row);
    if (fences_.drop_events() > 0) pool_->take_events_of(fences_);
}

std::unique_lock<std::mutex> TensorSpace::lock(const char* verb) const {
    pool_->driver().require_home(verb);  // before locking: the thread that had the mutex may not be in a forked child
    return std::unique_lock(mutex_);
}

Address TensorSpace::allocate(size_t bytes, Stream stream) {
    const auto locked = lock("allocate");
    if (pool_->released()) throw StateError("cannot allocate: the page pool is released");
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
    const auto locked = lock("record a use");
    find(address, "record a use of");
    const Tag tag = fences_.tag_of(stream);
    auto& tags = uses_[address];
    if (std::find(tags.begin(), tags.end(), tag) == tags.end()) tags.push_back(tag);
}

void TensorSpace::free(Address address, Stream stream) {
    if (!pool_->driver().at_home()) return;  // a copy of the tensor goes in a forked child; the parent has it still
    const auto locked = lock("free");
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
    const auto locked = lock("poll");
    poll_locked();
}

void TensorSpace::poll_locked() {
    for (Tag tag = 1; tag <= fences_.tags(); ++tag) {
        if (!fences_.poll(tag)) continue;
        fences_moved_ = true;
        granules_.promote(tag, fences_.passed_epoch(tag));
        blocks_.promote(tag, fences_.passed_epoch(tag));
    }
    if (!fences_moved_) return;
    fences_moved_ = false;
    std::erase_if(held_, [this](const Held& it) {
        const auto passed = [this](const Fence& fence) { return fences_.passed(fence); };
        if (!std::all_of(it.others.begin(), it.others.end(), passed)) return false;
        held_granules_ -= it.range.blocks * granules_.granules() + it.range.granules;
        give_back(it.range, it.fence);
        return true;
    });
}

void TensorSpace::count_in_rows(const Range& range, int change) {
    const uint32_t blocks = range.blocks == 0 ? 1 : range.blocks + (range.granules > 0 ? 1 : 0);
    const uint32_t last = (range.first_block + blocks - 1) / columns_;
    for (uint32_t row = range.first_block / columns_; row <= last; ++row) {
        live_in_row_[row] = static_cast<uint32_t>(static_cast<int64_t>(live_in_row_[row]) + change);
    }
}

}  // namespace harli
