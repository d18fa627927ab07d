// What a tensor space says about itself: figures, and whether its tables agree.
#include <string>

#include "tensor_space.hpp"

namespace harli {

bool TensorSpace::owns(Address address) const { return address >= base_ && address < base_ + view_bytes_; }

uint64_t TensorSpace::live() const {
    const auto locked = lock("count allocations");
    return counts_.live;
}

size_t TensorSpace::size_of(Address address) const {
    const auto locked = lock("look at an allocation");
    return find(address, "size").requested_bytes;
}

size_t TensorSpace::largest_allocatable() const {
    const size_t run = blocks_.longest_ready_run();
    return run > 0 ? run * block_bytes_ : granules_.largest_ready() * granule_bytes_;
}

SpaceStats TensorSpace::stats() const {
    const auto locked = lock("count bytes");
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
    const auto locked = lock("reset latencies");
    counts_.allocate = Latency{};
    counts_.free = Latency{};
}

void TensorSpace::check_integrity() const {
    const auto locked = lock("check the tensor space");
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
    }
    for (uint32_t row = 0; row < live_in_row_.size(); ++row) {
        require(!blocks_.holds(row) || pool_->released() || pool_->is_lent(row), "a row is held but not lent");
    }
    require(live_in_row == live_in_row_, "allocations of a row are miscounted");
    require(live == counts_.live && requested == counts_.requested_bytes && used == used_granules_ && held == held_granules_,
            "allocations are miscounted");
}

}  // namespace harli
