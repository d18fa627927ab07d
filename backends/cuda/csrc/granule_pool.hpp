// Small tensors: a buddy system of granules (paper section 4.3) over blocks that are cut up, called slabs.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "fences.hpp"

namespace harli {

// A granule is named by slab and position:  node = slab * granules + position.
//
//     slab   [      8      ][  4  ][ 2 ][1][1]    a free piece of n granules (a power of two) starts at a multiple of n;
//                                                 its buddy starts at position XOR n
// A request for n granules takes the smallest free piece that holds it and gives the rest back at once, so that no more
// than a granule is lost to rounding. A piece carries the fence of its last user. A freed piece merges with buddies that
// wait for the same stream or for none, and the whole then waits for the later fence: a little is kept from other streams
// for a while, but the stream that frees finds its memory in one piece again. A slab that comes wholly free is closed.
// Not thread-safe: the tensor space locks.
class GranulePool {
public:
    struct Slab {
        uint32_t block = 0;
        uint32_t free_granules = 0;
        bool in_use = false;
        bool open = true;  // otherwise nothing is allocated here
    };
    // What is allocated from a node on; granules = 0 where nothing is.
    struct Live {
        uint32_t granules = 0;
        uint32_t requested_bytes = 0;
        Tag tag = ready_tag;
    };
    // Called with a block, and the fence on it, when its slab has come wholly free and is closed.
    using Closed = std::function<void(uint32_t block, Fence fence)>;

    GranulePool(uint32_t granules, Closed closed);

    std::optional<uint32_t> take(uint32_t granules, Tag tag);  // a node, or nothing without growing
    void give(uint32_t node, uint32_t granules, Fence fence);
    void promote(Tag tag, uint64_t passed_epoch);  // pieces whose fence has passed become ready

    void prepare_slab();  // may throw; add_slab after it does not
    // Cut up a block; its first `used` granules are taken, the rest is free under `fence`. Returns the slab.
    uint32_t add_slab(uint32_t block, Fence fence, uint32_t used, bool open);
    void set_open(uint32_t slab, bool open);

    const Slab& slab(uint32_t slab) const { return slabs_[slab]; }
    uint32_t slabs() const { return static_cast<uint32_t>(slabs_.size()); }
    uint32_t granules() const { return granules_; }
    uint32_t largest_ready() const;  // granules of the largest piece that any stream may use

    Live& live(uint32_t node) { return cell(node).live; }
    const Live& live(uint32_t node) const { return cell(node).live; }

    struct Piece {
        uint32_t granules;
        Fence fence;
    };
    std::optional<Piece> free_piece(uint32_t node) const;  // the free piece that starts here
    void check_integrity() const;                          // of the free lists; throws StateError

private:
    static constexpr uint32_t none = ~uint32_t{0};
    static constexpr int orders = 32;
    struct Node {
        uint64_t epoch = 0;
        uint32_t previous = none;
        uint32_t next = none;
        Tag tag = ready_tag;
        int8_t order = -1;  // of the free piece that starts here, else -1
        Live live;
    };
    struct List {
        uint32_t nonempty = 0;  // bit n: there is a piece of 2**n granules
        std::array<uint32_t, orders> first;
        List() { first.fill(none); }
    };

    Node& cell(uint32_t node) { return nodes_[slab_of(node)][node & (granules_ - 1)]; }
    const Node& cell(uint32_t node) const { return nodes_[slab_of(node)][node & (granules_ - 1)]; }
    uint32_t slab_of(uint32_t node) const { return node >> top_order_; }
    List& list(Tag tag, bool open);
    List& list_of(uint32_t node) { return list(cell(node).tag, slabs_[slab_of(node)].open); }
    void link(uint32_t node, int order, Fence fence);
    void unlink(uint32_t node);
    void free_piece(uint32_t node, int order, Fence fence);
    void free_range(uint32_t node, uint32_t granules, Fence fence);

    uint32_t granules_;
    int top_order_;
    Closed closed_;
    std::vector<Slab> slabs_;
    std::vector<uint32_t> spare_slabs_;
    std::vector<std::unique_ptr<Node[]>> nodes_;  // by slab: growing moves nothing
    std::vector<List> lists_;  // by 2 * tag + open
};

}  // namespace harli
