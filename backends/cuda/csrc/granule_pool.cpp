#include "granule_pool.hpp"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace harli {

GranulePool::GranulePool(uint32_t granules, Closed closed)
    : granules_(granules), top_order_(std::countr_zero(granules)), closed_(std::move(closed)), lists_(2) {
    if (!std::has_single_bit(granules) || granules > (1U << 30)) {
        throw ConfigError("tensor space: a block must be a power of two granules, got " + std::to_string(granules));
    }
}

GranulePool::List& GranulePool::list(Tag tag, bool open) {
    const size_t at = 2 * static_cast<size_t>(tag) + (open ? 1 : 0);
    if (at >= lists_.size()) lists_.resize(2 * (static_cast<size_t>(tag) + 1));
    return lists_[at];
}

void GranulePool::link(uint32_t node, int order, Fence fence) {
    Node& it = cell(node);
    it.epoch = fence.epoch;
    it.tag = fence.tag;
    it.order = static_cast<int8_t>(order);
    List& into = list_of(node);
    it.previous = none;
    it.next = into.first[order];
    if (it.next != none) cell(it.next).previous = node;
    into.first[order] = node;
    into.nonempty |= 1U << order;
    slabs_[slab_of(node)].free_granules += 1U << order;
}

void GranulePool::unlink(uint32_t node) {
    Node& it = cell(node);
    List& from = list_of(node);
    if (it.next != none) cell(it.next).previous = it.previous;
    if (it.previous != none) {
        cell(it.previous).next = it.next;
    } else {
        from.first[it.order] = it.next;
        if (it.next == none) from.nonempty &= ~(1U << it.order);
    }
    slabs_[slab_of(node)].free_granules -= 1U << it.order;
    it.order = -1;
}

std::optional<uint32_t> GranulePool::take(uint32_t granules, Tag tag) {
    const int order = std::bit_width(granules - 1);
    if (order > top_order_) return std::nullopt;
    const uint32_t fitting = ~uint32_t{0} << order;
    const uint32_t own = list(tag, true).nonempty & fitting;
    const uint32_t ready = list(ready_tag, true).nonempty & fitting;
    if ((own | ready) == 0) return std::nullopt;
    // The smallest piece; of equals the stream's own, which it has just used.
    const bool use_own = own != 0 && (ready == 0 || std::countr_zero(own) <= std::countr_zero(ready));
    const int found = std::countr_zero(use_own ? own : ready);
    const uint32_t node = list(use_own ? tag : ready_tag, true).first[found];
    const Fence fence{cell(node).tag, cell(node).epoch};
    unlink(node);
    // The rest cannot merge with anything: all of it lies inside the piece just taken.
    for (uint32_t at = granules; at < 1U << found;) {
        const int piece = std::countr_zero(at);
        link(node + at, piece, fence);
        at += 1U << piece;
    }
    return node;
}

void GranulePool::give(uint32_t node, uint32_t granules, Fence fence) { free_range(node, granules, fence); }

void GranulePool::free_range(uint32_t node, uint32_t granules, Fence fence) {
    const uint32_t base = slab_of(node) * granules_;
    for (uint32_t at = node - base, end = at + granules; at < end;) {
        const int aligned = at == 0 ? top_order_ : std::countr_zero(at);
        const int piece = std::min(aligned, static_cast<int>(std::bit_width(end - at)) - 1);
        free_piece(base + at, piece, fence);
        at += 1U << piece;
    }
}

void GranulePool::free_piece(uint32_t node, int order, Fence fence) {
    const uint32_t slab = slab_of(node);
    const uint32_t base = slab * granules_;
    while (order < top_order_) {
        const uint32_t buddy = base + ((node - base) ^ (1U << order));
        const Node& it = cell(buddy);
        if (it.order != order || (it.tag != fence.tag && it.tag != ready_tag)) break;
        if (it.tag == fence.tag) fence.epoch = std::max(fence.epoch, it.epoch);
        unlink(buddy);
        node = std::min(node, buddy);
        ++order;
    }
    if (order < top_order_) {
        link(node, order, fence);
        return;
    }
    const uint32_t block = slabs_[slab].block;
    slabs_[slab].in_use = false;
    spare_slabs_.push_back(slab);
    closed_(block, fence);
}

void GranulePool::promote(Tag tag, uint64_t passed_epoch) {
    for (const bool open : {false, true}) {
        for (int order = 0; order < top_order_; ++order) {
            for (uint32_t node = list(tag, open).first[order]; node != none;) {
                const uint32_t next = cell(node).next;
                if (cell(node).epoch <= passed_epoch) {
                    unlink(node);
                    free_piece(node, order, Fence{});  // merges with ready pieces only, so `next` stays in its list
                }
                node = next;
            }
        }
    }
}

void GranulePool::prepare_slab() {
    if (!spare_slabs_.empty()) return;
    const auto slab = static_cast<uint32_t>(slabs_.size());
    if ((static_cast<uint64_t>(slab) + 1) * granules_ >= none) throw OutOfMemory("too many slabs");
    if (slabs_.size() == slabs_.capacity()) {
        const size_t room = 2 * slabs_.size() + 16;
        nodes_.reserve(room);
        spare_slabs_.reserve(room);
        slabs_.reserve(room);
    }
    nodes_.push_back(std::make_unique<Node[]>(granules_));
    slabs_.emplace_back();
    spare_slabs_.push_back(slab);
}

uint32_t GranulePool::add_slab(uint32_t block, Fence fence, uint32_t used, bool open) {
    const uint32_t slab = spare_slabs_.back();
    spare_slabs_.pop_back();
    slabs_[slab] = Slab{block, 0, true, open};
    const uint32_t base = slab * granules_;
    if (used == 0) {
        link(base, top_order_, fence);
    } else {
        for (uint32_t at = used; at < granules_;) {
            const int piece = std::countr_zero(at);
            link(base + at, piece, fence);
            at += 1U << piece;
        }
    }
    return slab;
}

void GranulePool::set_open(uint32_t slab, bool open) {
    if (slabs_[slab].open == open) return;
    std::vector<std::pair<uint32_t, Piece>> pieces;
    for (uint32_t node = slab * granules_; node < (slab + 1) * granules_; ++node) {
        if (const auto piece = free_piece(node)) pieces.emplace_back(node, *piece);
    }
    for (const auto& [node, piece] : pieces) unlink(node);
    slabs_[slab].open = open;
    for (const auto& [node, piece] : pieces) link(node, std::countr_zero(piece.granules), piece.fence);
}

uint32_t GranulePool::largest_ready() const {
    const uint32_t nonempty = lists_[1].nonempty;  // ready and open
    return nonempty == 0 ? 0 : std::bit_floor(nonempty);
}

std::optional<GranulePool::Piece> GranulePool::free_piece(uint32_t node) const {
    const Node& it = cell(node);
    if (it.order < 0) return std::nullopt;
    return Piece{1U << it.order, Fence{it.tag, it.epoch}};
}

void GranulePool::check_integrity() const {
    const auto require = [](bool right, const char* what) {
        if (!right) throw StateError(std::string("tensor space: ") + what);
    };
    size_t linked = 0;
    for (size_t at = 0; at < lists_.size(); ++at) {
        for (int order = 0; order < orders; ++order) {
            const bool marked = (lists_[at].nonempty >> order & 1) != 0;
            require(marked == (lists_[at].first[order] != none), "a free list is marked wrongly");
            uint32_t previous = none;
            for (uint32_t node = lists_[at].first[order]; node != none; node = cell(node).next) {
                const Node& it = cell(node);
                const Slab& slab = slabs_[slab_of(node)];
                require(it.order == order && it.previous == previous, "a free list is broken");
                require(slab.in_use && 2 * it.tag + (slab.open ? 1U : 0U) == at, "a free piece is in the wrong list");
                require(node % granules_ % (1U << order) == 0, "a free piece is misaligned");
                previous = node;
                ++linked;
            }
        }
    }
    size_t heads = 0;
    for (uint32_t slab = 0; slab < slabs_.size(); ++slab) {
        uint32_t free_granules = 0;
        for (uint32_t node = slab * granules_; node < (slab + 1) * granules_; ++node) {
            const Node& it = cell(node);
            if (it.order < 0) continue;
            ++heads;
            free_granules += 1U << it.order;
            if (it.order == top_order_) continue;
            const Node& buddy = cell(slab * granules_ + ((node & (granules_ - 1)) ^ (1U << it.order)));
            require(buddy.order != it.order || buddy.tag != it.tag, "free buddies are not merged");
        }
        require(free_granules == (slabs_[slab].in_use ? slabs_[slab].free_granules : 0), "free granules are miscounted");
    }
    require(heads == linked, "a free piece is in no list");
}

}  // namespace harli
